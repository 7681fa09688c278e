/* Steps of optimizers for which torch has no fused kernel: one pass over a parameter, its gradient and its states.

   An element does not depend on another one, so results do not depend on the number of threads. The rules are torch's, to
   rounding. */
#include "numbers.h"
#include "threads.h"

#define BLOCK 4096 /* elements that a thread steps at a time */
#define SMALL 16384 /* elements that one thread steps alone */

/* The numbers of a step. A decay of the weights is the factor `kept`, or is added to the gradient. What the letters are
   stands beside the rules. */
typedef struct {
    float sign, kept, decay, rate, eps, a, b, c, d, e;
} Call;

/* Updates `p` and element `i` of the states, by the gradient `g`. A row of `tensors` has the addresses of a parameter,
   its gradient and its states, and their length. */
#define DEFINE(NAME, RULE)                                                                                             \
    static void NAME##_of_one(float *parameters, const float *gradients, float *first, float *second, float *third,    \
                              int64_t count, const Call by, int threads) {                                            \
        (void)second, (void)third;                                                                                     \
        _Pragma("omp parallel for num_threads(count > SMALL ? threads : 1) schedule(static)")                          \
        for (int64_t block = 0; block < count; block += BLOCK) {                                                       \
            int64_t end = block + BLOCK < count ? block + BLOCK : count;                                               \
            _Pragma("omp simd") for (int64_t i = block; i < end; i++) {                                                \
                float p = parameters[i] * by.kept, g = gradients[i] * by.sign + p * by.decay;                          \
                RULE;                                                                                                  \
                parameters[i] = p;                                                                                     \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(const int64_t *tensors, int64_t number, const Call *call, int threads) {                             \
        for (int64_t at = 0; at < number; at++, tensors += 6)                                                          \
            NAME##_of_one((float *)tensors[0], (const float *)tensors[1], (float *)tensors[2], (float *)tensors[3],    \
                          (float *)tensors[4], tensors[5], *call, threads);                                          \
    }

/* a: what a mean of gradients takes of this one. b and c: what a mean of squares keeps, and takes. */
#define MEAN(STATE) STATE[i] += by.a * (g - STATE[i])
#define SQUARES(STATE) STATE[i] = STATE[i] * by.b + g * g * by.c
#define ROOT(SQUARES) (__builtin_sqrtf(SQUARES) + by.eps)

/* d: the momentum. */
DEFINE(rmsprop, SQUARES(first); p -= by.rate * g / ROOT(first[i]))
DEFINE(rmsprop_momentum, SQUARES(first); second[i] = second[i] * by.d + g / ROOT(first[i]); p -= by.rate * second[i])
DEFINE(rmsprop_centered, SQUARES(first); MEAN(second);
       p -= by.rate * g / ROOT(first[i] - second[i] * second[i]))
DEFINE(rmsprop_centered_momentum, SQUARES(first); MEAN(second);
       third[i] = third[i] * by.d + g / ROOT(first[i] - second[i] * second[i]); p -= by.rate * third[i])

/* d: the rate of the mean, while `rate` is that of the gradient. e: the bias of the mean of squares. */
DEFINE(nadam, MEAN(first); SQUARES(second); p -= (by.rate * g + by.d * first[i]) / ROOT(second[i] / by.e))

DEFINE(radam, MEAN(first); SQUARES(second); p -= by.rate * first[i] / ROOT(second[i]))
DEFINE(radam_unrectified, MEAN(first); SQUARES(second); p -= by.rate * first[i])

/* b: what the largest gradient keeps. A NaN stays one. */
DEFINE(adamax, MEAN(first); float kept = second[i] * by.b; float size = __builtin_fabsf(g) + by.eps;
       second[i] = kept != kept || kept > size ? kept : size; p -= by.rate * first[i] / second[i])

DEFINE(adadelta, SQUARES(first);
       float change = __builtin_sqrtf(second[i] + by.eps) / __builtin_sqrtf(first[i] + by.eps) * g;
       second[i] = second[i] * by.b + change * change * by.c; p -= by.rate * change)

/* a and b: the factors of a step after a change of the sign, and after none. c and d: the least and the largest step. */
DEFINE(rprop, float product = g * first[i]; float size = second[i] * (product > 0 ? by.b : product < 0 ? by.a : 1.0f);
       size = size < by.c ? by.c : size > by.d ? by.d : size; float kept = product < 0 ? 0.0f : g;
       p -= kept > 0 ? size : kept < 0 ? -size : 0.0f; first[i] = kept; second[i] = size)
