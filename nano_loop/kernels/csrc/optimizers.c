/* Clipping of gradients: one pass for their norm, and one that changes them. */
#include "numbers.h"
#include "threads.h"

/* A number in a list of tensors: an address, or a length. */
typedef int64_t Entry;

#define BLOCK 4096 /* elements that a thread takes at a time */

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
