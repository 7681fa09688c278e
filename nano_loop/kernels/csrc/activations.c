/* tanh, GELU by tanh, and its derivative, of tensors in bf16 or fp32, and the derivative of GELU by the error function in
   fp32. They are computed in fp32 and rounded once, as torch computes them.

   torch's hyperbolic tangent takes three to eight times as long. An element does not depend on another, so results do
   not depend on the number of threads. */
#include "numbers.h"

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
static inline float hyperbolic_tangent(float x) {
    float magnitude = __builtin_fabsf(x), e = exponential(-2.0f * magnitude);
    return __builtin_copysignf(magnitude < 1.0f ? tangent_within_1(x) : 1.0f - 2.0f * e / (1.0f + e), x);
}

/* x s(2u), with the logistic function s and u = √(2/π) (x + 0.044715 x³), which is x (1 + tanh u) / 2. */
static inline float argument(float x) { return x * (0.797884560802865f + 0.0356774081363f * x * x); }
static inline float gelu(float x) {
    float e = exponential(-2.0f * __builtin_fabsf(argument(x)));
    float magnitude = x > 100.0f ? 100.0f : __builtin_fabsf(x); /* from there on e is 0, and infinity times 0 is none */
    return (x < 0 ? -0.0f : x) - magnitude * (e / (1.0f + e));
}

/* s(2u) + x 2u' s(2u) s(-2u). For fp32, s near 0 is (1 + tanh u) / 2, which is rounded once. */
static inline float slope_of_gelu(float x, int is_fp32) {
    float u = argument(x), e = exponential(-2.0f * __builtin_fabsf(u));
    float larger = 1.0f / (1.0f + e), smaller = e * larger, s = x < 0 ? smaller : larger;
    if (is_fp32) s = __builtin_fabsf(u) < 1.0f ? 0.5f + 0.5f * tangent_within_1(u) : s;
    return s + larger * smaller * x * (1.59576912160573f + 0.2140644488178f * x * x);
}
static inline float slope_of_gelu_bf16(float x) { return slope_of_gelu(x, 0); }
static inline float slope_of_gelu_float(float x) { return slope_of_gelu(x, 1); }

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
    DEFINE_FORWARD(tanh_forward_##KIND, hyperbolic_tangent, __VA_ARGS__)                                               \
    DEFINE_FORWARD(gelu_forward_##KIND, gelu, __VA_ARGS__)                                                             \
    DEFINE_BACKWARD(gelu_backward_##KIND, slope_of_gelu_##KIND, __VA_ARGS__)

DEFINE(bf16, uint16_t, from_bf16, to_bf16)
DEFINE(float, float, from_float, to_float)
DEFINE_BACKWARD(exact_gelu_backward_float, slope_of_exact_gelu, float, from_float, to_float)
