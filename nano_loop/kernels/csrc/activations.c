/* tanh, GELU by tanh, and its derivative, of tensors in bf16 or fp32, and the derivative of GELU by the error function in
   fp32. They are computed in fp32 and rounded once, as torch computes them.

   torch's hyperbolic tangent takes three to eight times as long. An element does not depend on another, so results do
   not depend on the number of threads. */
#include "numbers.h"
#include "threads.h"

#define BLOCK 4096 /* elements that a thread computes at a time */

/* tanh of numbers from -1 to 1, by a polynomial that was fitted to a relative error of 7e-9. */
static inline float tangent_within_1(float x) {
    float square = x * x, p = -0.0003584508958738297f;
    p = p * square + 0.0023013607133179903f;
    p = p * square - 0.007946101017296314f;
    p = p * square + 0.02148665301501751f;
    p = p * square - 0.05387980118393898f;
    p = p * square + 0.13332344591617584f;
    p = p * square - 0.33333295583724976f;
    return x + x * (square * p);
}

/* Beyond 1, 1 - 2e / (1 + e) with e = exp(-2|x|), of which nothing cancels. */
static inline float hyperbolic_tangent_bf16(float x) {
    float magnitude = __builtin_fabsf(x), e = exponential(-2.0f * magnitude);
    return __builtin_copysignf(magnitude < 1.0f ? tangent_within_1(x) : 1.0f - 2.0f * e / (1.0f + e), x);
}

/* exp of a number that is at most 700, in fp64 to a relative error of 3e-10. Below -700 it is 0. */
static inline double exponential_in_fp64(double x) {
    double clipped = !(x < -700.0) ? x : -700.0;
    double shifted = clipped * 1.4426950408889634 + 6755399441055744.0; /* 1.5 * 2^52: rounds to an integer */
    double n = shifted - 6755399441055744.0, r = clipped - n * 0.6931471805599453, p = 1.0 / 40320, power;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023u) << 52;
    memcpy(&power, &bits, sizeof power);
    return x < -700.0 ? 0.0 : p * power;
}

/* For fp32 in fp64, so that the result is rounded once, as torch's is. Near 0, where 1 - e cancels, by the series. */
static inline float hyperbolic_tangent_float(float x) {
    double magnitude = __builtin_fabsf(x), square = magnitude * magnitude;
    double e = exponential_in_fp64(-2.0 * magnitude), series = 1.0 + square * (square * (2.0 / 15) - 1.0 / 3);
    double found = magnitude < 0.015625 ? magnitude * series : (1.0 - e) / (1.0 + e);
    return __builtin_copysignf((float)found, x);
}

/* x s(2u), with the logistic function s and u = √(2/π) (x + 0.044715 x³), which is x (1 + tanh u) / 2. */
static inline float argument(float x) { return x * (0.797884560802865f + 0.0356774081363f * x * x); }
static inline float gelu(float x) {
    float e = exponential(-2.0f * __builtin_fabsf(argument(x)));
    float magnitude = x > 100.0f ? 100.0f : __builtin_fabsf(x); /* from there on e is 0, and infinity times 0 is none */
    return (x < 0 ? -0.0f : x) - magnitude * (e / (1.0f + e));
}

/* s(2u) + x 2u' s(2u) s(-2u), for fp32 in fp64: it is multiplied by a gradient, and rounded once. */
static inline float slope_of_gelu_bf16(float x) {
    float e = exponential(-2.0f * __builtin_fabsf(argument(x)));
    float larger = 1.0f / (1.0f + e), smaller = e * larger;
    return (x < 0 ? smaller : larger) + larger * smaller * x * (1.59576912160573f + 0.2140644488178f * x * x);
}
static inline double slope_of_gelu_float(double x) {
    double slope = 1.5957691216057308 + 0.21406444881780076 * x * x;
    double e = exponential_in_fp64(-__builtin_fabs(x * (1.5957691216057308 + 0.07135481627260025 * x * x)));
    double larger = 1.0 / (1.0 + e), smaller = e * larger;
    return (x < 0 ? smaller : larger) + larger * smaller * x * slope;
}

/* Φ(x) + x φ(x), the slope of x Φ(x). Below 0, Φ is exp(-x²/2) times a polynomial of 1 / (1 + 0.26 |x|), which was fitted
   to a relative error of 4e-8. */
static inline float slope_of_exact_gelu(float x) {
    float e = exponential(-0.5f * x * x), t = 1.0f / (1.0f + 0.26f * __builtin_fabsf(x));
    float p = 0.030783632770180702f;
    p = p * t - 0.15418951213359833f;
    p = p * t + 0.2543182373046875f;
    p = p * t - 0.15420681238174438f;
    p = p * t + 0.1632206290960312f;
    p = p * t + 0.050046905875205994f;
    p = p * t + 0.10328542441129684f;
    p = p * t + 0.10298021137714386f;
    p = p * t + 0.10376126319169998f;
    float tail = e * (p * t);
    return (x < 0 ? tail : 1.0f - tail) + 0.398942280401432678f * x * e;
}

#define DEFINE_FORWARD(NAME, FUNCTION, TYPE, FROM, TO)                                                                 \
    void NAME(const TYPE *inputs, TYPE *out, int64_t count, int threads) {                                             \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                              \
        for (int64_t block = 0; block < count; block += BLOCK) {                                                       \
            int64_t end = block + BLOCK < count ? block + BLOCK : count;                                               \
            _Pragma("omp simd") for (int64_t i = block; i < end; i++) out[i] = TO(FUNCTION(FROM(inputs[i])));          \
        }                                                                                                              \
    }

#define DEFINE_BACKWARD(NAME, SLOPE, TYPE, FROM, TO)                                                                   \
    void NAME(const TYPE *gradients, const TYPE *inputs, TYPE *out, int64_t count, int threads) {                      \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                              \
        for (int64_t block = 0; block < count; block += BLOCK) {                                                       \
            int64_t end = block + BLOCK < count ? block + BLOCK : count;                                               \
            _Pragma("omp simd") for (int64_t i = block; i < end; i++)                                                  \
                out[i] = TO(FROM(gradients[i]) * SLOPE(FROM(inputs[i])));                                              \
        }                                                                                                              \
    }

#define DEFINE(KIND, ...)                                                                                              \
    DEFINE_FORWARD(tanh_forward_##KIND, hyperbolic_tangent_##KIND, __VA_ARGS__)                                        \
    DEFINE_FORWARD(gelu_forward_##KIND, gelu, __VA_ARGS__)                                                             \
    DEFINE_BACKWARD(gelu_backward_##KIND, slope_of_gelu_##KIND, __VA_ARGS__)

DEFINE(bf16, uint16_t, from_bf16, to_bf16)
DEFINE(float, float, from_float, to_float)
DEFINE_BACKWARD(exact_gelu_backward_float, slope_of_exact_gelu, float, from_float, to_float)
