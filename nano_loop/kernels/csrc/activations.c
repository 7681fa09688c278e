/* tanh, GELU by tanh, and its derivative, of bf16 tensors: in fp32, rounded once, as torch computes them.

   torch's hyperbolic tangent takes three times as long. An element does not depend on another, so results do not depend
   on the number of threads. */
#include "numbers.h"

#define BLOCK 4096 /* elements that a thread computes at a time */

static inline float sigmoid(float x) {
    float e = exponential(-__builtin_fabsf(x)), larger = 1.0f / (1.0f + e);
    return x < 0 ? e * larger : larger;
}

static inline float hyperbolic_tangent(float x) {
    float e = exponential(-2.0f * __builtin_fabsf(x)), square = x * x;
    float found = __builtin_copysignf((1.0f - e) / (1.0f + e), x);
    float series = x * (1.0f + square * (-0.333333333f + square * (0.133333333f + square * -0.053968254f)));
    return square < 0.01f ? series : found; /* where 1 - e cancels, the series is exact */
}

/* x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, by tanh(u) = 2 sigmoid(2u) - 1. */
static inline float twice_the_argument(float x) { return 1.59576912160573f * (x + 0.044715f * x * x * x); }
static inline float gelu(float x) { return x * sigmoid(twice_the_argument(x)); }
static inline float slope_of_gelu(float x) {
    float s = sigmoid(twice_the_argument(x));
    return s + x * s * (1.0f - s) * 1.59576912160573f * (1.0f + 0.134145f * x * x);
}

#define FORWARD(NAME, FUNCTION)                                                                                        \
    void NAME(const uint16_t *inputs, uint16_t *out, int64_t count, int threads) {                                     \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                              \
        for (int64_t block = 0; block < count; block += BLOCK) {                                                       \
            int64_t end = block + BLOCK < count ? block + BLOCK : count;                                               \
            _Pragma("omp simd") for (int64_t i = block; i < end; i++) out[i] = to_bf16(FUNCTION(from_bf16(inputs[i]))); \
        }                                                                                                              \
    }

FORWARD(tanh_forward, hyperbolic_tangent)
FORWARD(gelu_forward, gelu)

void gelu_backward(const uint16_t *gradients, const uint16_t *inputs, uint16_t *out, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < count; block += BLOCK) {
        int64_t end = block + BLOCK < count ? block + BLOCK : count;
#pragma omp simd
        for (int64_t i = block; i < end; i++)
            out[i] = to_bf16(from_bf16(gradients[i]) * slope_of_gelu(from_bf16(inputs[i])));
    }
}
