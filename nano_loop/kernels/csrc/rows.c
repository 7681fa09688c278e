/* The gradient of a table of rows, such as an embedding, and optimizer steps for such a table.

   Few rows of a large table have a gradient in a step. Its dense gradient stays in memory between steps, and only the
   rows of the last step are zeroed. A row has two marks: it is in the gradient, and its state is not zero. A step
   changes no row without a mark, and reads no gradient of a row that is not in it.

   Sums are in torch's order, and the rules match torch's fused kernels bit for bit: a product is rounded before it is
   added, except in `fmadd`. `nano_loop.optimizers.row_steps` compares the two once per process. */
#pragma GCC optimize("fp-contract=off")
#include <stddef.h>

#include "numbers.h"
#include "threads.h"
#include "update_rules.h"

#define HAS_GRADIENT 1
#define HAS_STATE 2
#define CHUNK 64 /* values of a row that are summed at a time */
#define ROWS 256 /* rows that a thread updates at a time */

/* Adds the gradients of `count` lookups to the rows of a table, and adds new rows to the list of rows in the gradient.
   Returns the length of the list. `sources` are the rows of the lookups' gradients, or NULL. `last` must be -1 for each
   row of the table; `following` needs space for two values per lookup. */
int sum_rows(const float *gradients, const int64_t *indices, const int64_t *sources, float *table,
             uint8_t *marks, int64_t *listed, int32_t *last, int32_t *following, int64_t count, int64_t length,
             int64_t width, int64_t padding, int threads) {
    int32_t *firsts = following + count;
    int64_t distinct = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = indices[i];
        if (row == padding) continue;
        following[i] = -1;
        if (last[row] < 0) firsts[distinct++] = (int32_t)i;
        else following[last[row]] = (int32_t)i;
        last[row] = (int32_t)i;
    }
    for (int64_t i = 0; i < distinct; i++) {
        int64_t row = indices[firsts[i]];
        last[row] = -1;
        if (!(marks[row] & HAS_GRADIENT)) listed[length++] = row;
        marks[row] |= HAS_GRADIENT;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < distinct; i++) {
        float *row = table + indices[firsts[i]] * width;
        for (int64_t start = 0; start < width; start += CHUNK) {
            float sums[CHUNK] = {0};
            int64_t size = width - start < CHUNK ? width - start : CHUNK;
            for (int64_t at = firsts[i]; at >= 0; at = following[at]) {
                const float *gradient = gradients + (sources ? sources[at] : at) * width + start;
#pragma omp simd
                for (int64_t k = 0; k < size; k++) sums[k] += gradient[k];
            }
#pragma omp simd
            for (int64_t k = 0; k < size; k++) row[start + k] += sums[k];
        }
    }
    return (int)length;
}

/* Removes the rows in the list from the gradient, and zeroes them unless `table` is NULL. */
void clear_rows(float *table, uint8_t *marks, const int64_t *listed, int64_t length, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < length; i++) {
        marks[listed[i]] &= (uint8_t)~HAS_GRADIENT;
        if (table) memset(table + listed[i] * width, 0, (size_t)width * sizeof(float));
    }
}

/* Marks the rows in which one of two states has a nonzero value. The second state may be NULL. */
void mark_states(const float *state, const float *other, uint8_t *marks, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        uint32_t bits = 0;
        for (int64_t k = row * width; k < (row + 1) * width; k++) {
            bits |= bits_of(state[k]);
            if (other) bits |= bits_of(other[k]);
        }
        marks[row] = (uint8_t)((marks[row] & HAS_GRADIENT) | (bits ? HAS_STATE : 0));
    }
}

static inline void adam_number(float *parameter, float gradient, float *mean, float *square, const struct adam rule) {
    *mean = mean_after(*mean, gradient * rule.sign, rule);
    *square = square_after(*square, gradient * rule.sign, rule);
    *parameter = adam(*parameter, *mean, *square, rule);
}

/* One step of Adam or AdamW for the marked rows; the others only decay. The rows in the gradient have a state from then
   on. */
void adam_rows(float *parameters, const float *gradients, float *means, float *squares, uint8_t *marks, int64_t rows,
               int64_t width, double sign, double decay, double weight, double second, double kept, double root,
               double eps, double size, int threads) {
    const struct adam rule = {(float)sign, (float)decay, (float)weight, (float)second,
                              (float)kept, (float)root,  (float)eps,    (float)size};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < rows; block += ROWS) {
        int64_t end = block + ROWS < rows ? block + ROWS : rows;
        for (int64_t row = block; row < end; row++) {
            float *p = parameters + row * width, *m = means + row * width, *s = squares + row * width;
            const float *g = gradients + row * width;
            if (marks[row] & HAS_GRADIENT) {
#pragma omp simd
                for (int64_t k = 0; k < width; k++) adam_number(p + k, g[k], m + k, s + k, rule);
                marks[row] |= HAS_STATE;
            } else if (marks[row]) {
#pragma omp simd
                for (int64_t k = 0; k < width; k++) adam_number(p + k, 0.0f, m + k, s + k, rule);
            } else if (rule.decay != 1.0f) {
#pragma omp simd
                for (int64_t k = 0; k < width; k++) p[k] *= rule.decay;
            }
        }
    }
}

static inline void sgd_number(float *parameter, float gradient, float *momentum, const struct sgd rule) {
    *momentum = momentum_after(*momentum, gradient * rule.sign, rule);
    *parameter = sgd(*parameter, gradient * rule.sign, *momentum, rule);
}

/* One step of SGD with momentum for the marked rows, in the same way. */
void momentum_rows(float *parameters, const float *gradients, float *momenta, uint8_t *marks, int64_t rows,
                   int64_t width, int64_t is_nesterov, double sign, double momentum, double share, double size, int threads) {
    const struct sgd rule = {(float)sign, (float)momentum, (float)share, (float)size, is_nesterov};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < rows; block += ROWS) {
        int64_t end = block + ROWS < rows ? block + ROWS : rows;
        for (int64_t row = block; row < end; row++) {
            float *p = parameters + row * width, *m = momenta + row * width;
            const float *g = gradients + row * width;
            if (marks[row] & HAS_GRADIENT) {
#pragma omp simd
                for (int64_t k = 0; k < width; k++) sgd_number(p + k, g[k], m + k, rule);
                marks[row] |= HAS_STATE;
            } else if (marks[row]) {
#pragma omp simd
                for (int64_t k = 0; k < width; k++) sgd_number(p + k, 0.0f, m + k, rule);
            }
        }
    }
}

/* One step of SGD without momentum for the listed rows that are among the first `rows` rows. */
void sgd_rows(float *parameters, const float *gradients, const int64_t *listed, int64_t length, int64_t rows,
              int64_t width, double sign, double size, int threads) {
    const float negated = (float)sign, rate = (float)size;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < length; i++) {
        if (listed[i] >= rows) continue;
        float *p = parameters + listed[i] * width;
        const float *g = gradients + listed[i] * width;
#pragma omp simd
        for (int64_t k = 0; k < width; k++) p[k] = fmadd(g[k] * negated, rate, p[k]);
    }
}

/* One step of Adagrad for the listed rows that are among the first `rows` rows. */
void adagrad_rows(float *parameters, const float *gradients, float *sums, const int64_t *listed, int64_t length,
                  int64_t rows, int64_t width, double sign, double size, double eps, int threads) {
    const float negated = (float)sign, rate = (float)size, least = (float)eps;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < length; i++) {
        if (listed[i] >= rows) continue;
        float *p = parameters + listed[i] * width, *s = sums + listed[i] * width;
        const float *g = gradients + listed[i] * width;
#pragma omp simd
        for (int64_t k = 0; k < width; k++) {
            float gradient = g[k] * negated;
            s[k] = fmadd(gradient, gradient, s[k]);
            p[k] = p[k] - rate * gradient / (__builtin_sqrtf(s[k]) + least);
        }
    }
}
