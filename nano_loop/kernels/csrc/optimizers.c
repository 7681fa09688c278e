/* One step of SGD, Adam or AdamW for a tensor, in one pass over memory.

   A weight is in fp32, or split into the nearest bf16 value, with ties rounded up, and a signed 16-bit rest: the
   difference from the fp32 value. Gradients and states are in fp32 or bf16. A block of values is unpacked to fp32,
   updated by the rules of torch's fused kernels, and packed again while it is in the cache. States are rounded to bf16
   stochastically, which preserves the mean. The random numbers depend on the element's index and the step only.

   Rests are only valid for the bf16 values that they were computed with. Each block has a checksum of these, and if
   other code has written to a block, its rests are treated as 0. */
#pragma GCC optimize("fp-contract=off")
#include <stddef.h>

#include "denormals.h"
#include "numbers.h"
#include "threads.h"
#include "update_rules.h"

#define BLOCK 1024  /* values per checksum; also defined in `nano_loop.optimizers.split` */
#define TOGETHER 8  /* values per vector in torch's kernels, which round differently in the remainder */
#define STATES 3

/* The tensors of a step, with `count` elements. Weights with `rests` are split. */
struct tensors {
    void *weights;
    int16_t *rests;
    uint32_t *checksums;
    const void *gradients;
    void *states[STATES]; /* NULL-terminated if there are fewer */
    int64_t count, in_bf16; /* a bit for the gradients, and one for each state */
    uint32_t keys[2]; /* for the random numbers */
};

/* A block in fp32. torch computes its first `vectors` values in vectors. */
struct block {
    float *weights, *states[STATES];
    const float *gradients;
    int64_t length, vectors;
    int flushes; /* whether denormal states become 0; weights never do */
};

/* Updates a block. */
typedef void (*Rule)(const struct block *block, const void *settings);

#define SIZE 0x7fffffffu    /* the bits without the sign */
#define LARGEST 0x7f7f0000u /* the largest finite bf16 value */
#define HALF 0x8000u        /* half a unit in the last place of bf16 */

/* Infinity, NaN and values that would be rounded to infinity keep their upper half. A value that would be rounded up to
   the largest bf16 value cannot have a rest, and becomes the preceding value. */
static inline void split(float value, uint16_t *upper, int16_t *rest) {
    uint32_t bits = bits_of(value), size = bits & SIZE;
    bits = size - (LARGEST - HALF) < HALF ? (bits & ~SIZE) | (LARGEST - HALF - 1) : bits;
    *upper = (uint16_t)((size < LARGEST + HALF ? bits + HALF : bits) >> 16);
    *rest = (int16_t)bits;
}

static inline float joined(uint16_t upper, int16_t rest) {
    uint32_t bits = (uint32_t)upper << 16;
    return of_bits(bits + ((bits & SIZE) < LARGEST ? (uint32_t)(int32_t)rest : (uint16_t)rest));
}

/* A checksum of values and their positions, without patterns that changes could preserve. */
static uint32_t checksum(const uint16_t *numbers, int64_t length) {
    uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < length; k++) {
        uint32_t mixed = (numbers[k] | (uint32_t)k << 16) * 0x9e3779b1u;
        sum += (mixed ^ mixed >> 15) * 0x85ebca77u;
    }
    return sum;
}

/* 32 random bits for an element of a tensor and a step, after Ellis' lowbias32. */
static inline uint32_t drawn(uint32_t place, const uint32_t *keys) {
    uint32_t mixed = place * 0x9e3779b1u + keys[0];
    mixed = (mixed ^ mixed >> 16) * 0x7feb352du;
    mixed = ((mixed ^ mixed >> 15) + keys[1]) * 0x846ca68bu;
    return mixed ^ mixed >> 16;
}

/* Values whose rounding could overflow keep their upper half. */
static inline uint16_t rounded(float value, uint32_t random) {
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + ((bits & SIZE) < LARGEST ? random & 0xffffu : 0)) >> 16);
}

static void unpack(const uint16_t *numbers, float *out, int64_t length) {
#pragma omp simd
    for (int64_t k = 0; k < length; k++) out[k] = from_bf16(numbers[k]);
}

static void unpack_weights(const uint16_t *uppers, const int16_t *rests, float *out, int64_t length) {
#pragma omp simd
    for (int64_t k = 0; k < length; k++) out[k] = joined(uppers[k], rests[k]);
}

static void pack_weights(const float *weights, uint16_t *uppers, int16_t *rests, int64_t length) {
#pragma omp simd
    for (int64_t k = 0; k < length; k++) split(weights[k], uppers + k, rests + k);
}

static void pack_state(const float *state, uint16_t *out, int64_t first, int64_t length, int shift, const uint32_t *keys) {
#pragma omp simd
    for (int64_t k = 0; k < length; k++) out[k] = rounded(state[k], drawn((uint32_t)(first + k), keys) >> shift);
}

/* Updates a tensor, block by block. */
static void step(const struct tensors *of, Rule rule, const void *settings, int flushes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < of->count; first += BLOCK) {
        float weights[BLOCK], gradients[BLOCK], states[STATES][BLOCK];
        int64_t length = of->count - first < BLOCK ? of->count - first : BLOCK;
        struct block block = {.length = length, .vectors = length - length % TOGETHER, .flushes = flushes};
        uint16_t *uppers = (uint16_t *)of->weights + first;
        if (of->rests) {
            block.weights = weights;
            if (of->checksums[first / BLOCK] == checksum(uppers, length))
                unpack_weights(uppers, of->rests + first, weights, length);
            else
                unpack(uppers, weights, length);
        } else
            block.weights = (float *)of->weights + first;
        block.gradients = gradients;
        if (of->in_bf16 & 1) unpack((const uint16_t *)of->gradients + first, gradients, length);
        else block.gradients = (const float *)of->gradients + first;
        for (int i = 0; i < STATES && of->states[i]; i++) {
            int in_bf16 = of->in_bf16 >> (i + 1) & 1;
            block.states[i] = in_bf16 ? states[i] : (float *)of->states[i] + first;
            if (in_bf16) unpack((uint16_t *)of->states[i] + first, states[i], length);
        }
        rule(&block, settings);
        if (of->rests) {
            pack_weights(weights, uppers, of->rests + first, length);
            of->checksums[first / BLOCK] = checksum(uppers, length);
        }
        for (int i = 0; i < STATES && of->states[i]; i++)
            if (of->in_bf16 >> (i + 1) & 1)
                pack_state(states[i], (uint16_t *)of->states[i] + first, first, length, 8 * i, of->keys);
    }
}

struct adam_settings {
    struct adam rule;
    float coupled; /* the part of the weight decay that is added to the gradient */
};

/* Updates the means and squares of some values. After the last full vector, torch's compiler adds in another order. */
static inline void update_moments(const struct block *of, int64_t begin, int64_t end, int is_vector,
                                  const struct adam_settings settings) {
    const float *weights = of->weights, *gradients = of->gradients;
    float *means = of->states[0], *squares = of->states[1];
    const struct adam rule = settings.rule;
#pragma omp simd
    for (int64_t k = begin; k < end; k++) {
        float gradient = gradients[k] * rule.sign;
        gradient = settings.coupled != 0 ? fmadd(weights[k], settings.coupled, gradient) : gradient;
        means[k] = mean_after(means[k], gradient, rule);
        squares[k] = is_vector ? square_after(squares[k], gradient, rule)
                               : fmadd(squares[k], rule.kept, rule.second * gradient * gradient);
    }
}

static void adam_block(const struct block *of, const void *given) {
    const struct adam_settings settings = *(const struct adam_settings *)given;
    float *weights = of->weights, *means = of->states[0], *squares = of->states[1], *largest = of->states[2];
    unsigned before = flush_denormals(of->flushes);
    update_moments(of, 0, of->vectors, 1, settings);
    update_moments(of, of->vectors, of->length, 0, settings);
    restore(before);
    if (largest) {
#pragma omp simd
        for (int64_t k = 0; k < of->length; k++) largest[k] = largest[k] >= squares[k] ? largest[k] : squares[k];
        squares = largest;
    }
#pragma omp simd
    for (int64_t k = 0; k < of->length; k++) weights[k] = adam(weights[k], means[k], squares[k], settings.rule);
}

/* Adam and AdamW; `largest` are the squares of AMSGrad, or NULL. The last arguments are those of `struct adam`. */
void adam_step(void *weights, int16_t *rests, uint32_t *checksums, const void *gradients, void *means, void *squares,
               void *largest, int64_t count, int64_t in_bf16, int64_t key, int64_t flushes,
               double coupled, double sign, double decay, double weight, double second, double kept, double root,
               double eps, double size, int threads) {
    const struct tensors tensors = {weights, rests, checksums, gradients, {means, squares, largest}, count, in_bf16,
                                    {(uint32_t)key, (uint32_t)(key >> 32)}};
    const struct adam_settings settings = {{(float)sign, (float)decay, (float)weight, (float)second, (float)kept,
                                            (float)root, (float)eps, (float)size},
                                           (float)coupled};
    step(&tensors, adam_block, &settings, (int)flushes, threads);
}

struct sgd_settings {
    struct sgd rule;
    float coupled;
    int is_first; /* the momenta are not initialized yet */
};

/* The gradient, negated if maximizing, plus weight decay. */
static inline float direction(float weight, float gradient, const struct sgd_settings settings) {
    float signed_gradient = gradient * settings.rule.sign;
    return settings.coupled != 0 ? fmadd(weight, settings.coupled, signed_gradient) : signed_gradient;
}

static inline void update_momenta(const struct block *of, int64_t begin, int64_t end, int is_vector,
                                  const struct sgd_settings settings) {
    const float *weights = of->weights, *gradients = of->gradients;
    float *momenta = of->states[0];
    const struct sgd rule = settings.rule;
#pragma omp simd
    for (int64_t k = begin; k < end; k++) {
        float gradient = direction(weights[k], gradients[k], settings);
        float momentum = is_vector ? momentum_after(momenta[k], gradient, rule)
                                   : fmadd(momenta[k], rule.momentum, rule.share * gradient);
        momenta[k] = settings.is_first ? gradient : momentum;
    }
}

static void sgd_block(const struct block *of, const void *given) {
    const struct sgd_settings settings = *(const struct sgd_settings *)given;
    const float *gradients = of->gradients;
    float *weights = of->weights, *momenta = of->states[0];
    unsigned before = flush_denormals(of->flushes);
    if (momenta) {
        update_momenta(of, 0, of->vectors, 1, settings);
        update_momenta(of, of->vectors, of->length, 0, settings);
    }
    restore(before);
#pragma omp simd
    for (int64_t k = 0; k < of->length; k++) {
        float gradient = direction(weights[k], gradients[k], settings);
        weights[k] = sgd(weights[k], gradient, momenta ? momenta[k] : gradient, settings.rule);
    }
}

/* SGD; `momenta` may be NULL. The last arguments are those of `struct sgd`. */
void sgd_step(void *weights, int16_t *rests, uint32_t *checksums, const void *gradients, void *momenta, int64_t count,
              int64_t in_bf16, int64_t key, int64_t flushes, int64_t is_first,
              int64_t is_nesterov, double coupled, double sign, double momentum, double share, double size, int threads) {
    const struct tensors tensors = {weights, rests, checksums, gradients, {momenta}, count, in_bf16,
                                    {(uint32_t)key, (uint32_t)(key >> 32)}};
    const struct sgd_settings settings = {{(float)sign, (float)momentum, (float)share, (float)size, is_nesterov},
                                          (float)coupled, (int)is_first};
    step(&tensors, sgd_block, &settings, (int)flushes, threads);
}
