/* One step of SGD, Adam or AdamW for a tensor, in one pass over memory.

   A weight is in fp32, or split into the nearest bf16 value, with ties rounded up, and a signed 16-bit rest: the
   difference from the fp32 value. Its gradient is in fp32 or bf16, too. States are in fp32 or bf16. Values are converted
   to fp32 in registers, updated by the rules of torch's fused kernels, and converted back. States are rounded to bf16
   stochastically, which preserves the mean. The random numbers depend on the element's index and the step only.

   Rests are only valid for the bf16 values that they were computed with. Each block has a checksum of these, and if
   other code has written to a block, its rests are treated as 0. */
#pragma GCC optimize("fp-contract=off")
#include <stddef.h>

#include "denormals.h"
#include "lanes.h"
#include "numbers.h"
#include "threads.h"
#include "update_rules.h"

#define BLOCK 512   /* values per checksum; also defined in `nano_loop.optimizers.split` */
#define TOGETHER 8  /* values per vector in torch's kernels, which round differently in the remainder */
#define STATES 3

/* The tensors of a step, with `count` elements. Weights with `rests` are split. */
struct tensors {
    void *weights;
    int16_t *rests;
    uint32_t *checksums;
    const void *gradients;
    void *states[STATES]; /* NULL-terminated if there are fewer */
    int64_t count, is_narrow; /* whether the states are in bf16 */
    int flushes; /* whether denormal states become 0; weights never do */
    uint32_t keys[2]; /* for the random numbers */
};

/* A part of them that stays in the L1 cache: the weights are updated after all states. torch computes its first
   `vectors` values in vectors. */
struct block {
    void *weights, *states[STATES];
    int16_t *rests;
    const int16_t *valid_rests; /* these, or zeros */
    const void *gradients;
    int64_t first, length, vectors;
    int flushes;
    const uint32_t *keys;
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

static inline uint32_t mixed(uint32_t pair, int64_t place) {
    uint32_t bits = (pair + (uint32_t)place * 0x9e3779b1u) * 0x85ebca77u;
    return (bits ^ bits >> 15) * 0x846ca68bu;
}

/* A checksum of pairs of values and their positions, without patterns that changes could preserve. */
static uint32_t checksum(const uint16_t *numbers, int64_t length) {
    uint32_t sum = length % 2 ? mixed(numbers[length - 1], length / 2) : 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < length / 2; k++) {
        uint32_t pair;
        memcpy(&pair, numbers + 2 * k, sizeof pair);
        sum += mixed(pair, k);
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

INLINE float loaded(const void *numbers, int64_t k, int is_bf16) {
    return is_bf16 ? from_bf16(((const uint16_t *)numbers)[k]) : ((const float *)numbers)[k];
}

INLINE float loaded_weight(const struct block *of, int64_t k, int is_split) {
    return is_split ? joined(((const uint16_t *)of->weights)[k], of->valid_rests[k]) : ((const float *)of->weights)[k];
}

INLINE void store_weight(const struct block *of, int64_t k, float weight, int is_split) {
    if (is_split) split(weight, (uint16_t *)of->weights + k, of->rests + k);
    else ((float *)of->weights)[k] = weight;
}

/* Stores a state in bf16; others are in memory already. */
INLINE void store_state(const struct block *of, int state, int64_t k, float value, int is_narrow) {
    if (!is_narrow) return;
    uint32_t random = drawn((uint32_t)(of->first + k), of->keys) >> 8 * state;
    ((uint16_t *)of->states[state])[k] = rounded(value, random);
}

/* Updates a tensor, block by block, by the rule for split or fp32 weights, and bf16 or fp32 states. */
static void step(const struct tensors *of, const Rule rules[2][2], const void *settings, int threads) {
    static const int16_t zeros[BLOCK];
    const Rule rule = rules[of->rests != NULL][of->is_narrow];
    int64_t weight = of->rests ? 2 : 4, state = of->is_narrow ? 2 : 4; /* bytes */
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < of->count; first += BLOCK) {
        int64_t length = least(BLOCK, of->count - first);
        struct block block = {.first = first, .length = length, .vectors = length - length % TOGETHER,
                              .weights = (char *)of->weights + weight * first,
                              .gradients = (const char *)of->gradients + weight * first,
                              .flushes = of->flushes, .keys = of->keys};
        for (int i = 0; i < STATES && of->states[i]; i++) block.states[i] = (char *)of->states[i] + state * first;
        if (of->rests) {
            block.rests = of->rests + first;
            int is_valid = of->checksums[first / BLOCK] == checksum(block.weights, length);
            block.valid_rests = is_valid ? block.rests : zeros;
        }
        rule(&block, settings);
        if (of->rests) of->checksums[first / BLOCK] = checksum(block.weights, length);
    }
}

/* Compiles a rule for each combination of formats. */
#define FOR_FORMATS(RULE)                                                                                              \
    static void RULE##_fp32(const struct block *of, const void *settings) { RULE(of, settings, 0, 0); }                \
    static void RULE##_narrow(const struct block *of, const void *settings) { RULE(of, settings, 0, 1); }              \
    static void RULE##_split(const struct block *of, const void *settings) { RULE(of, settings, 1, 0); }               \
    static void RULE##_both(const struct block *of, const void *settings) { RULE(of, settings, 1, 1); }                \
    static const Rule RULE##_rules[2][2] = {{RULE##_fp32, RULE##_narrow}, {RULE##_split, RULE##_both}};

/* The gradient of a value, negated if maximizing, plus weight decay. */
INLINE float direction(const struct block *of, int64_t k, float sign, float coupled, int is_split) {
    float gradient = loaded(of->gradients, k, is_split) * sign;
    return coupled != 0 ? fmadd(loaded_weight(of, k, is_split), coupled, gradient) : gradient;
}

struct adam_settings {
    struct adam rule;
    float coupled; /* the part of the weight decay that is added to the gradient */
};

/* Updates the means and squares of some values. After the last full vector, torch's compiler adds in another order. */
INLINE void update_moments(const struct block *of, float *means, float *squares, int64_t begin, int64_t end,
                           int is_vector, const struct adam rule, float coupled, int is_split, int is_narrow) {
#pragma omp simd
    for (int64_t k = begin; k < end; k++) {
        float gradient = direction(of, k, rule.sign, coupled, is_split);
        float square = loaded(of->states[1], k, is_narrow);
        means[k] = mean_after(loaded(of->states[0], k, is_narrow), gradient, rule);
        squares[k] = is_vector ? square_after(square, gradient, rule)
                               : fmadd(square, rule.kept, rule.second * gradient * gradient);
    }
}

INLINE void adam_block(const struct block *given, const void *settings, int is_split, int is_narrow) {
    const struct block block = *given, *of = &block;
    const struct adam rule = ((const struct adam_settings *)settings)->rule;
    const float coupled = ((const struct adam_settings *)settings)->coupled;
    float buffers[STATES][BLOCK], *states[STATES];
    for (int i = 0; i < STATES; i++) states[i] = is_narrow ? buffers[i] : of->states[i];
    float *means = states[0], *squares = states[1], *divisors = squares;
    unsigned before = flush_denormals(of->flushes);
    if (coupled != 0) update_moments(of, means, squares, 0, of->vectors, 1, rule, coupled, is_split, is_narrow);
    else update_moments(of, means, squares, 0, of->vectors, 1, rule, 0, is_split, is_narrow);
    update_moments(of, means, squares, of->vectors, of->length, 0, rule, coupled, is_split, is_narrow);
    restore(before);
    if (of->states[2]) {
        divisors = states[2];
#pragma omp simd
        for (int64_t k = 0; k < of->length; k++) {
            float largest = loaded(of->states[2], k, is_narrow);
            divisors[k] = largest >= squares[k] ? largest : squares[k];
            store_state(of, 2, k, divisors[k], is_narrow);
        }
    }
#pragma omp simd
    for (int64_t k = 0; k < of->length; k++) {
        store_weight(of, k, adam(loaded_weight(of, k, is_split), means[k], divisors[k], rule), is_split);
        store_state(of, 0, k, means[k], is_narrow);
        store_state(of, 1, k, squares[k], is_narrow);
    }
}

FOR_FORMATS(adam_block)

/* Adam and AdamW; `largest` are the squares of AMSGrad, or NULL. The last arguments are those of `struct adam`. */
void adam_step(void *weights, int16_t *rests, uint32_t *checksums, const void *gradients, void *means, void *squares,
               void *largest, int64_t count, int64_t is_narrow, int64_t key, int64_t flushes,
               double coupled, double sign, double decay, double weight, double second, double kept, double root,
               double eps, double size, int threads) {
    const struct tensors tensors = {weights, rests, checksums, gradients, {means, squares, largest}, count, is_narrow,
                                    (int)flushes, {(uint32_t)key, (uint32_t)(key >> 32)}};
    const struct adam_settings settings = {{(float)sign, (float)decay, (float)weight, (float)second, (float)kept,
                                            (float)root, (float)eps, (float)size},
                                           (float)coupled};
    step(&tensors, adam_block_rules, &settings, threads);
}

struct sgd_settings {
    struct sgd rule;
    float coupled;
    int is_first; /* the momenta are not initialized yet */
};

INLINE void update_momenta(const struct block *of, float *momenta, int64_t begin, int64_t end, int is_vector,
                           const struct sgd_settings settings, int is_split, int is_narrow) {
    const struct sgd rule = settings.rule;
#pragma omp simd
    for (int64_t k = begin; k < end; k++) {
        float gradient = direction(of, k, rule.sign, settings.coupled, is_split);
        float old = loaded(of->states[0], k, is_narrow);
        float momentum = is_vector ? momentum_after(old, gradient, rule)
                                   : fmadd(old, rule.momentum, rule.share * gradient);
        momenta[k] = settings.is_first ? gradient : momentum;
    }
}

INLINE void sgd_block(const struct block *given, const void *given_settings, int is_split, int is_narrow) {
    const struct block block = *given, *of = &block;
    const struct sgd_settings settings = *(const struct sgd_settings *)given_settings;
    float buffer[BLOCK], *momenta = is_narrow ? buffer : of->states[0];
    unsigned before = flush_denormals(of->flushes);
    if (of->states[0]) {
        update_momenta(of, momenta, 0, of->vectors, 1, settings, is_split, is_narrow);
        update_momenta(of, momenta, of->vectors, of->length, 0, settings, is_split, is_narrow);
    }
    restore(before);
    if (!of->states[0]) {
#pragma omp simd
        for (int64_t k = 0; k < of->length; k++) {
            float gradient = direction(of, k, settings.rule.sign, settings.coupled, is_split);
            float weight = loaded_weight(of, k, is_split);
            store_weight(of, k, sgd(weight, gradient, gradient, settings.rule), is_split);
        }
        return;
    }
#pragma omp simd
    for (int64_t k = 0; k < of->length; k++) {
        float gradient = direction(of, k, settings.rule.sign, settings.coupled, is_split);
        float weight = loaded_weight(of, k, is_split);
        store_weight(of, k, sgd(weight, gradient, momenta[k], settings.rule), is_split);
        store_state(of, 0, k, momenta[k], is_narrow);
    }
}

FOR_FORMATS(sgd_block)

/* SGD; `momenta` may be NULL. The last arguments are those of `struct sgd`. */
void sgd_step(void *weights, int16_t *rests, uint32_t *checksums, const void *gradients, void *momenta, int64_t count,
              int64_t is_narrow, int64_t key, int64_t flushes, int64_t is_first,
              int64_t is_nesterov, double coupled, double sign, double momentum, double share, double size, int threads) {
    const struct tensors tensors = {weights, rests, checksums, gradients, {momenta}, count, is_narrow,
                                    (int)flushes, {(uint32_t)key, (uint32_t)(key >> 32)}};
    const struct sgd_settings settings = {{(float)sign, (float)momentum, (float)share, (float)size, is_nesterov},
                                          (float)coupled, (int)is_first};
    step(&tensors, sgd_block_rules, &settings, threads);
}
