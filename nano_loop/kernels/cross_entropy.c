/* Cross-entropy over the last dimension, and its gradient, without a tensor of logarithms in between.

   A row of logits is read twice in the forward, the second time from the cache, and once in the backward. Sums have 16
   lanes, as a vector has, and are added up in double precision, so a result depends neither on the number of threads
   nor on the width of vectors. */
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 512 /* elements between two additions in double precision, a multiple of LANES */

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_float(float value) { return value; }
static inline float from_bf16(uint16_t value) { return of_bits((uint32_t)value << 16); }
static inline float to_float(float value) { return value; }

/* To the nearest, and of two as near to the even one, as torch rounds; a NaN stays one. */
static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

/* exp of a number that is at most 88, by the scheme of Cephes' expf: 2^n times a polynomial of what is left. Below -87
   it is 0. Comparisons are such that a NaN stays one. */
static inline float exponential(float x) {
    float clipped = !(x < -87.0f) ? x : -87.0f;
    float shifted = clipped * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    float n = shifted - 12582912.0f;
    float r = clipped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float scaled = p * of_bits((bits_of(shifted) + 127u) << 23);
    return x < -87.0f ? 0.0f : scaled;
}

#define DEFINE(NAME, TYPE, FROM)                                                                                       \
    static float maximum_##NAME(const TYPE *row, int64_t width) {                                                      \
        float lanes[LANES], found = FROM(row[0]);                                                                      \
        int64_t at = 0;                                                                                                \
        for (int i = 0; i < LANES; i++) lanes[i] = found;                                                              \
        for (; at + LANES <= width; at += LANES)                                                                       \
            _Pragma("omp simd") for (int i = 0; i < LANES; i++) {                                                      \
                float value = FROM(row[at + i]);                                                                       \
                lanes[i] = value > lanes[i] ? value : lanes[i];                                                        \
            }                                                                                                          \
        for (; at < width; at++) lanes[0] = FROM(row[at]) > lanes[0] ? FROM(row[at]) : lanes[0];                       \
        for (int i = 0; i < LANES; i++) found = lanes[i] > found ? lanes[i] : found;                                   \
        return found;                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* Returns the sum of exp(row - maximum), and writes that of row - maximum. */                                     \
    static double sums_##NAME(const TYPE *row, int64_t width, float maximum, double *of_row) {                         \
        double total = 0, plain = 0;                                                                                   \
        for (int64_t start = 0; start < width; start += BLOCK) {                                                       \
            int64_t end = start + BLOCK < width ? start + BLOCK : width, at = start;                                   \
            float lanes[LANES] = {0}, values[LANES] = {0};                                                             \
            for (; at + LANES <= end; at += LANES)                                                                     \
                _Pragma("omp simd") for (int i = 0; i < LANES; i++) {                                                  \
                    float value = FROM(row[at + i]) - maximum;                                                         \
                    lanes[i] += exponential(value);                                                                    \
                    values[i] += value;                                                                                \
                }                                                                                                      \
            for (; at < end; at++) {                                                                                   \
                lanes[0] += exponential(FROM(row[at]) - maximum);                                                      \
                values[0] += FROM(row[at]) - maximum;                                                                  \
            }                                                                                                          \
            for (int i = 0; i < LANES; i++) {                                                                          \
                total += lanes[i];                                                                                     \
                plain += values[i];                                                                                    \
            }                                                                                                          \
        }                                                                                                              \
        *of_row = plain;                                                                                               \
        return total;                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* For each of `rows` rows of `width` logits: the largest, and the logarithm of the sum of the exponentials of what\
       each differs from that, and the loss, 0 for the target `ignored`. `smoothing` is the part of the target that all\
       classes share. Returns 0, and writes nothing, if a target is not a class. */                                    \
    int cross_entropy_##NAME(const TYPE *logits, const int64_t *targets, int64_t rows, int64_t width, int64_t ignored, \
                             double smoothing, float *maxima, float *log_sums, float *losses, int threads) {           \
        for (int64_t i = 0; i < rows; i++)                                                                             \
            if (targets[i] != ignored && (targets[i] < 0 || targets[i] >= width)) return 0;                            \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                              \
        for (int64_t i = 0; i < rows; i++) {                                                                           \
            const TYPE *row = logits + i * width;                                                                      \
            double of_row, maximum = maxima[i] = maximum_##NAME(row, width);                                           \
            double log_sum = __builtin_log(sums_##NAME(row, width, maxima[i], &of_row));                               \
            log_sums[i] = (float)log_sum;                                                                              \
            losses[i] = 0;                                                                                             \
            if (targets[i] == ignored) continue;                                                                       \
            losses[i] = (float)((1 - smoothing) * (log_sum - (FROM(row[targets[i]]) - maximum)));                      \
            if (smoothing) losses[i] += (float)(smoothing * (log_sum - of_row / width));                               \
        }                                                                                                              \
        return 1;                                                                                                      \
    }

DEFINE(float, float, from_float)
DEFINE(bf16, uint16_t, from_bf16)

/* The gradient of the losses by the logits: softmax less the target, times the row's factor; 0 for ignored rows. */
#define DEFINE_GRADIENT(NAME, TYPE, FROM, OUTPUT, TO)                                                                  \
    void gradient_##NAME(const TYPE *logits, const int64_t *targets, int64_t rows, int64_t width, int64_t ignored,     \
                         double smoothing, const float *maxima, const float *log_sums, const float *factors,           \
                         OUTPUT *gradient, int threads) {                                                              \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                              \
        for (int64_t i = 0; i < rows; i++) {                                                                           \
            const TYPE *row = logits + i * width;                                                                      \
            OUTPUT *out = gradient + i * width;                                                                        \
            if (targets[i] == ignored) {                                                                               \
                memset(out, 0, width * sizeof(OUTPUT));                                                                \
                continue;                                                                                              \
            }                                                                                                          \
            float maximum = maxima[i], log_sum = log_sums[i], factor = factors[i], shared = (float)(smoothing / width);\
            for (int64_t at = 0; at < width; at++)                                                                     \
                out[at] = TO((exponential(FROM(row[at]) - maximum - log_sum) - shared) * factor);                      \
            int64_t target = targets[i];                                                                               \
            float expected = (float)(1 - smoothing) + shared;                                                          \
            out[target] = TO((exponential(FROM(row[target]) - maximum - log_sum) - expected) * factor);                \
        }                                                                                                              \
    }

DEFINE_GRADIENT(float_to_float, float, from_float, float, to_float)
DEFINE_GRADIENT(bf16_to_float, uint16_t, from_bf16, float, to_float)
DEFINE_GRADIENT(bf16_to_bf16, uint16_t, from_bf16, uint16_t, to_bf16)
