/* Cross-entropy over the last dimension, and its gradient, without an intermediate tensor of log-probabilities.

   A row of logits is read twice in the forward, the second time from the cache, and once in the backward. Sums have 16
   lanes and are accumulated in double precision, so results depend neither on the number of threads nor on the vector
   width. */
#include "logarithm.h"
#include "numbers.h"
#include "threads.h"

#define LANES 16
#define BLOCK 512 /* elements between two additions in double precision, a multiple of LANES */

#define DEFINE(NAME, TYPE, FROM)                                                                                       \
    static float maximum_##NAME(const TYPE *row, int64_t width) {                                                      \
        float lanes[LANES], found = -__builtin_inff(); /* ignores NaN, which propagates by the sum */                  \
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
    /* Returns the sum of exp(row - maximum), and writes the sum of row - maximum. */                                  \
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
    /* For each of `rows` rows of `width` logits: the maximum, the sum of exp(logit - maximum), and the loss, which is \
       0 for the target `ignored`. `smoothing` is the part of the target distributed over all classes. Returns 0 and   \
       writes nothing if a target is not a class. */                                                                   \
    int cross_entropy_##NAME(const TYPE *logits, const int64_t *targets, int64_t rows, int64_t width, int64_t ignored, \
                             double smoothing, float *maxima, float *sums, float *losses, int threads) {               \
        for (int64_t i = 0; i < rows; i++)                                                                             \
            if (targets[i] != ignored && (targets[i] < 0 || targets[i] >= width)) return 0;                            \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                              \
        for (int64_t i = 0; i < rows; i++) {                                                                           \
            const TYPE *row = logits + i * width;                                                                      \
            double of_row, maximum = maxima[i] = maximum_##NAME(row, width);                                           \
            double sum = sums_##NAME(row, width, maxima[i], &of_row), log_sum = logarithm(sum);                        \
            sums[i] = (float)sum;                                                                                      \
            losses[i] = 0;                                                                                             \
            if (targets[i] == ignored) continue;                                                                       \
            losses[i] = (float)((1 - smoothing) * (log_sum - (FROM(row[targets[i]]) - maximum)));                      \
            if (smoothing) losses[i] += (float)(smoothing * (log_sum - of_row / width));                               \
        }                                                                                                              \
        return 1;                                                                                                      \
    }

DEFINE(float, float, from_float)
DEFINE(bf16, uint16_t, from_bf16)

/* The gradient of the losses with respect to the logits: softmax minus the target, times the row's factor; 0 for
   ignored rows. The exponentials are divided by their sum, because the logarithm of a large sum has fewer fractional
   digits. The result may overwrite the logits. */
#define DEFINE_GRADIENT(NAME, TYPE, FROM, OUTPUT, TO)                                                                  \
    void gradient_##NAME(const TYPE *logits, const int64_t *targets, int64_t rows, int64_t width, int64_t ignored,     \
                         double smoothing, const float *maxima, const float *sums, const float *factors,               \
                         OUTPUT *gradient, int threads) {                                                              \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                              \
        for (int64_t i = 0; i < rows; i++) {                                                                           \
            const TYPE *row = logits + i * width;                                                                      \
            OUTPUT *out = gradient + i * width;                                                                        \
            if (targets[i] == ignored) {                                                                               \
                memset(out, 0, width * sizeof(OUTPUT));                                                                \
                continue;                                                                                              \
            }                                                                                                          \
            double factor = factors[i], shared = factor * smoothing / (double)width, part = factor / sums[i];          \
            float maximum = maxima[i], scale = (float)part, offset = (float)shared;                                    \
            double expected = factor * (1 - smoothing) + shared, target = exponential(FROM(row[targets[i]]) - maximum);\
            for (int64_t at = 0; at < width; at++) out[at] = TO(exponential(FROM(row[at]) - maximum) * scale - offset);\
            out[targets[i]] = TO((float)(target * part - expected));                                                   \
        }                                                                                                              \
    }

DEFINE_GRADIENT(float_to_float, float, from_float, float, to_float)
DEFINE_GRADIENT(bf16_to_float, uint16_t, from_bf16, float, to_float)
DEFINE_GRADIENT(bf16_to_bf16, uint16_t, from_bf16, uint16_t, to_bf16)
