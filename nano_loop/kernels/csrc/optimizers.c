/* Steps of optimizers for which torch has no fused kernel: one pass over a parameter, its gradient and its states. And
   clipping of gradients: one pass for their norm, and one that changes them.

   An element does not depend on another one, so results do not depend on the number of threads. The rules are torch's, to
   rounding. */
#include "numbers.h"
#include "threads.h"

/* A number in a list of tensors: an address, or a length. */
typedef int64_t Entry;

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
    void NAME(const Entry *tensors, int64_t number, const Call *call, int threads) {                               \
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

/* Clipping of gradients of one dtype, which are listed from `row` to `end`: by the address of one and its length; or by that
   of a table, its negative width, the address of a list of those rows that are not zero, and the length of the list. */
#define LARGE 131072       /* numbers that one thread clips alone */
#define SUMS 64            /* of pieces: what a thread adds up does not depend on how many there are */
#define LARGEST_SUM 3.4e38 /* of squares: beyond, it is infinite in fp32 */

typedef struct {
    int64_t begin, count;
} Piece;

static const int64_t *after(const int64_t *row) { return row + (row[1] < 0 ? 4 : 2); }

static int64_t pieces_of(const int64_t *row) { return row[1] < 0 ? row[3] : (row[1] + BLOCK - 1) / BLOCK; }

static Piece piece_of(const int64_t *row, int64_t at) {
    if (row[1] < 0) return (Piece){((const int64_t *)row[2])[at] * -row[1], -row[1]};
    int64_t begin = at * BLOCK;
    return (Piece){begin, begin + BLOCK < row[1] ? BLOCK : row[1] - begin};
}

/* One thread, too, for gradients that share memory: threads do not wait for each other between two of them. */
static int threads_for(const int64_t *first, const int64_t *end, int64_t bytes, int threads) {
    int64_t count = 0;
    for (const int64_t *row = first; row < end; row = after(row)) count += row[1] < 0 ? -row[1] * row[3] : row[1];
    if (threads == 1 || count <= LARGE) return 1;
    for (const int64_t *row = first; row < end; row = after(row))
        for (const int64_t *other = after(row); other < end; other = after(other))
            if (row[0] < other[0] + other[1] * bytes && other[0] < row[0] + row[1] * bytes) return 1;
    return threads;
}

/* Replaces each number, the float `value`. */
#define DEFINE_CHANGE(NAME, TYPE, LOAD, STORE, RULE)                                                                   \
    static void NAME(const int64_t *first, const int64_t *end, float by, int threads) {                                \
        _Pragma("omp parallel num_threads(threads)") for (const int64_t *row = first; row < end; row = after(row)) {   \
            int64_t pieces = pieces_of(row);                                                                           \
            _Pragma("omp for schedule(static) nowait") for (int64_t at = 0; at < pieces; at++) {                       \
                Piece piece = piece_of(row, at);                                                                       \
                TYPE *values = (TYPE *)row[0] + piece.begin;                                                           \
                _Pragma("omp simd") for (int64_t i = 0; i < piece.count; i++) {                                        \
                    float value = LOAD(values[i]);                                                                     \
                    RULE;                                                                                              \
                    values[i] = STORE(value);                                                                          \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

/* `clip_norm` writes the norm, and returns 1, or 2 if it has scaled the gradients. Where the norm is not finite, it writes
   nothing and returns 0. */
#define DEFINE_CLIPPING(DTYPE, TYPE, LOAD, STORE)                                                                      \
    DEFINE_CHANGE(scale_##DTYPE, TYPE, LOAD, STORE, value *= by)                                                       \
    DEFINE_CHANGE(limit_##DTYPE, TYPE, LOAD, STORE, value = value < -by ? -by : value; value = value > by ? by : value)  \
    static double squares_##DTYPE(const TYPE *values, int64_t count) {                                                 \
        double sum = 0;                                                                                                \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < count; i++) {                                   \
            double value = LOAD(values[i]);                                                                            \
            sum += value * value;                                                                                      \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
    int clip_norm_##DTYPE(const Entry *first, int64_t length, double most, TYPE *norm, int threads) {                  \
        const int64_t *end = first + length;                                                                           \
        double sums[SUMS] = {0}, sum = 0;                                                                              \
        threads = threads_for(first, end, sizeof(TYPE), threads);                                                      \
        _Pragma("omp parallel num_threads(threads)") for (const int64_t *row = first; row < end; row = after(row)) {   \
            int64_t pieces = pieces_of(row);                                                                           \
            _Pragma("omp for schedule(static) nowait") for (int64_t part = 0; part < SUMS; part++)                     \
                for (int64_t at = part * pieces / SUMS; at < (part + 1) * pieces / SUMS; at++) {                       \
                    Piece piece = piece_of(row, at);                                                                   \
                    sums[part] += squares_##DTYPE((const TYPE *)row[0] + piece.begin, piece.count);                    \
                }                                                                                                      \
        }                                                                                                              \
        for (int part = 0; part < SUMS; part++) sum += sums[part];                                                     \
        if (!(sum < LARGEST_SUM)) return 0;                                                                            \
        double size = __builtin_sqrt(sum), factor = most / (size + 1e-6);                                              \
        *norm = STORE((float)size);                                                                                    \
        if (!(factor < 1)) return 1;                                                                                   \
        scale_##DTYPE(first, end, (float)factor, threads);                                                             \
        return 2;                                                                                                      \
    }                                                                                                                  \
    void clip_value_##DTYPE(const Entry *first, int64_t length, double most, int threads) {                            \
        const int64_t *end = first + length;                                                                           \
        limit_##DTYPE(first, end, LOAD(STORE((float)most)), threads_for(first, end, sizeof(TYPE), threads));           \
    }

DEFINE_CLIPPING(float32, float, to_float, from_float)
DEFINE_CLIPPING(bfloat16, uint16_t, from_bf16, to_bf16)
