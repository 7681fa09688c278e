/* Batch norm, group norm and layer norm, forward and backward, for fp32 and bf16 tensors.

   A forward reads a tensor once for its statistics and once for the result; a backward reads two tensors twice. Sums
   have 16 lanes in fp32 over at most 16 rows or 1,024 contiguous elements, and are then accumulated in double
   precision. A tensor is partitioned based on its shape only, so results depend neither on the number of threads nor on
   the vector width, except for how the compiler fuses multiplications and additions. Each part has its sum and the
   squared differences from its own mean, so equal elements have no variance however large they are.

   Statistics of batch and group norms belong to (s, c): a segment s and a channel c. Tensors are in NHWC, as rows of
   channels, or in NCHW, where a row is one channel of one image. A batch norm in NHWC has all rows in one segment.
   Otherwise, a segment is an image. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "denormals.h"
#include "elements.h"
#include "threads.h"

#define LANES 16
#define ROWS 16         /* rows per fp32 sum */
#define NEIGHBOURS 1024 /* contiguous elements per fp32 sum */
#define SOME_ROWS 32    /* rows whose mean is subtracted before squaring */
#define SOME_NEIGHBOURS 128
#define ROWS_OF_A_CHUNK 256 /* approximate number, if there are few rows */
#define LEAST_ROWS 32       /* minimum rows of a chunk, and rows per fp32 sum in the backward of a layer norm */
#define CHUNKS 128          /* approximate number, if there are many rows */
#define SHARED 8            /* a number of chunks that 2, 4 or 8 threads can share equally */

#define MIXED 2
#define PARTS (LANES / WIDTH)
#define FOR_PARTS _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)

typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

typedef struct {
    int64_t segments, rows, channels; /* in NCHW, `rows` are the elements of a channel of an image */
    int64_t nhwc, bf16; /* 1, or MIXED for a backward: x is in bf16, both gradients in fp32 */
    /* NULL, or for a batch norm: adds the values per channel and two sums by channel of the other parts of the batch.
       Returns 0 if that failed. */
    int (*exchange)(double *elements, double *first, double *second);
} Shape;

/* Evaluates CALL, in which `bf16` is a constant. */
#define BY_DTYPE(CALL)                                                                                                 \
    do {                                                                                                               \
        if (shape->bf16 == MIXED) {                                                                                    \
            const int bf16 = MIXED;                                                                                    \
            CALL;                                                                                                      \
        } else                                                                                                         \
            SPECIALIZED(bf16, shape->bf16, CALL);                                                                      \
    } while (0)

/* The sum of 16 lanes. */
INLINE double sum_of(const Vector *parts) {
    Vector lanes[PARTS];
    eight halves[2];
    four quarters[2];
    FOR_PARTS lanes[part] = parts[part];
    memcpy(halves, lanes, sizeof halves);
    halves[0] += halves[1];
    memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    return ((double)quarters[0][0] + quarters[0][1]) + ((double)quarters[0][2] + quarters[0][3]);
}

/* 1 in the last `count` of 16 lanes, otherwise 0: the lanes at the end of a row that previous vectors do not cover. */
INLINE Vector last_lanes(int64_t count, int part) {
    Vector mask = {0};
    for (int lane = 0; lane < WIDTH; lane++) mask[lane] = part * WIDTH + lane >= LANES - count;
    return mask;
}

/* The number of chunks for the rows of a segment. They have equal lengths, and threads can share them equally, unless
   that already holds for the segments. */
static int64_t chunks_of(const Shape *shape) {
    if (!shape->nhwc || !shape->segments) return 1;
    int64_t chunks = least(shape->rows / ROWS_OF_A_CHUNK, CHUNKS / shape->segments);
    if (shape->segments < CHUNKS && shape->segments % SHARED) chunks = (chunks / SHARED + 1) * SHARED;
    return most(1, least(chunks, shape->rows / LEAST_ROWS));
}

/* The first row of a chunk. */
INLINE int64_t row_of_chunk(const Shape *shape, int64_t chunk, int64_t chunks) { return shape->rows * chunk / chunks; }

/* Partial sums for `wide` vectors of channels over some rows in NHWC: of x - shift and its square, or of gradients and
   their products with x - shift. Individual variables rather than arrays, which would stay in memory. */
INLINE void sums_of_tile(const void *x, const void *gradient, int64_t at, int64_t rows, int64_t channels, int wide,
                         int bf16, const Vector *shift, Vector *first, Vector *second) {
    Vector first0 = {0}, first1 = {0}, first2 = {0}, first3 = {0};
    Vector second0 = {0}, second1 = {0}, second2 = {0}, second3 = {0};
    Vector shift0 = shift[0], shift1 = shift[1], shift2 = shift[2], shift3 = shift[3];
#define ADD(I)                                                                                                         \
    if (I < wide) {                                                                                                    \
        Vector apart = load(x, at + I * WIDTH, bf16) - shift##I;                                                       \
        Vector factor = gradient ? load(gradient, at + I * WIDTH, bf16 == 1) : apart;                                  \
        first##I += factor;                                                                                            \
        second##I += factor * apart;                                                                                   \
    }
    for (int64_t row = 0; row < rows; row++, at += channels) {
        ADD(0) ADD(1) ADD(2) ADD(3)
    }
#undef ADD
    first[0] = first0, first[1] = first1, first[2] = first2, first[3] = first3;
    second[0] = second0, second[1] = second1, second[2] = second2, second[3] = second3;
}

/* Double-precision sums over a chunk for some channels: of x and of squared differences from its mean, or, with
   `centers`, of gradients and their products with x - centers. Before squaring, the mean of some rows is subtracted,
   which reduces fp32 rounding errors. */
INLINE void tile(const void *gradient, const void *x, int64_t start, int64_t rows, int64_t channels, int64_t channel,
                 int wide, int bf16, const float *centers, double *sums, double *products) {
    Vector shift[4] = {{0}}, first[4], second[4];
    double plain[4 * WIDTH] = {0}, multiplied[4 * WIDTH] = {0};
    float by[4 * WIDTH];
    int count = wide * WIDTH;
    int64_t at = start * channels + channel;
    for (int i = 0; i < wide; i++)
        shift[i] = centers ? load(centers, channel + i * WIDTH, 0) : load(x, at + i * WIDTH, bf16);
    if (!centers) {
        int64_t some = least(rows, SOME_ROWS);
        sums_of_tile(x, 0, at, some, channels, wide, bf16, shift, first, second);
        for (int i = 0; i < wide; i++) shift[i] += first[i] / (float)some;
    }
    for (int64_t row = 0; row < rows; row += ROWS) {
        sums_of_tile(x, gradient, at + row * channels, least(ROWS, rows - row), channels, wide, bf16, shift, first,
                     second);
        add_to(plain, first, count);
        add_to(multiplied, second, count);
    }
    memcpy(by, shift, sizeof by);
    for (int i = 0; i < count; i++) {
        sums[channel + i] = centers ? plain[i] : plain[i] + (double)rows * by[i];
        products[channel + i] = centers ? multiplied[i] : multiplied[i] - plain[i] * plain[i] / (double)rows;
    }
}

/* The sums of all channels of a chunk, in tiles of four, two and one vectors. The last tile may overlap. */
INLINE void chunk(const void *gradient, const void *x, int64_t start, int64_t rows, int64_t channels, int bf16,
                  const float *centers, double *sums, double *products) {
    int64_t channel = 0;
    for (; channel + 4 * WIDTH <= channels; channel += 4 * WIDTH)
        tile(gradient, x, start, rows, channels, channel, 4, bf16, centers, sums, products);
    for (; channel + 2 * WIDTH <= channels; channel += 2 * WIDTH)
        tile(gradient, x, start, rows, channels, channel, 2, bf16, centers, sums, products);
    for (; channel < channels; channel += WIDTH)
        tile(gradient, x, start, rows, channels, least(channel, channels - WIDTH), 1, bf16, centers, sums, products);
}

/* Sums of contiguous elements, like `sums_of_tile`, for one part of the 16 lanes. */
INLINE void sums_of_lanes(const void *x, const void *gradient, int64_t at, int64_t count, int bf16, float shift,
                          int part, Vector *first, Vector *second) {
    Vector first0 = {0}, first1 = {0}, first2 = {0}, first3 = {0};
    Vector second0 = {0}, second1 = {0}, second2 = {0}, second3 = {0};
    int64_t place = 0;
#define ADD(I, MASK)                                                                                                   \
    {                                                                                                                  \
        Vector apart = load(x, at + place + I * LANES, bf16) - shift;                                                  \
        Vector factor = gradient ? load(gradient, at + place + I * LANES, bf16 == 1) : apart;                          \
        factor = factor MASK;                                                                                          \
        first##I += factor;                                                                                            \
        second##I += factor * apart;                                                                                   \
    }
    for (; place + 4 * LANES <= count; place += 4 * LANES) {
        ADD(0, ) ADD(1, ) ADD(2, ) ADD(3, )
    }
    for (; place + LANES <= count; place += LANES) ADD(0, )
    if (place < count) {
        Vector mask = last_lanes(count - place, part);
        place = count - LANES;
        ADD(0, * mask)
    }
#undef ADD
    *first = (first0 + first1) + (first2 + first3);
    *second = (second0 + second1) + (second2 + second3);
}

/* Sums of contiguous elements, one part of the lanes after another, so that all sums fit into registers. */
INLINE void sums_of_neighbours(const void *x, const void *gradient, int64_t at, int64_t count, int bf16, float shift,
                               double *first, double *second) {
    Vector firsts[PARTS], seconds[PARTS];
    for (int part = 0; part < PARTS; part++)
        sums_of_lanes(x, gradient, at + part * WIDTH, count, bf16, shift, part, firsts + part, seconds + part);
    *first = sum_of(firsts);
    *second = sum_of(seconds);
}

/* Like `tile`, for a contiguous row of at least 16 elements. */
INLINE void row(const void *gradient, const void *x, int64_t at, int64_t count, int bf16, const float *center,
                double *sums, double *products) {
    double first, second, plain = 0, multiplied = 0;
    float shift = center ? *center : load(x, at, bf16)[0];
    if (!center) {
        int64_t some = least(count, SOME_NEIGHBOURS);
        sums_of_neighbours(x, 0, at, some, bf16, shift, &first, &second);
        shift += (float)(first / (double)some);
    }
    for (int64_t start = 0; start < count; start += NEIGHBOURS) {
        int64_t block = count - start < NEIGHBOURS + LANES ? count - start : NEIGHBOURS; /* none shorter than 16 */
        sums_of_neighbours(x, gradient, at + start, block, bf16, shift, &first, &second);
        plain += first;
        multiplied += second;
        if (block != NEIGHBOURS) break;
    }
    if (!center) {
        multiplied -= plain * plain / (double)count;
        plain += (double)count * shift;
    }
    *sums = plain;
    *products = multiplied;
}

/* 1 / sqrt(variance + eps), given squared differences. Rounding may have made them negative; NaN is preserved. */
INLINE double inverse_of(double *squares, double count, double eps) {
    *squares = *squares < 0 ? 0 : *squares;
    return 1 / __builtin_sqrt(*squares / count + eps);
}

/* The sums of each segment's chunks: [segment, chunk, c]. */
static void sums(const Shape *shape, const void *gradient, const void *x, const float *centers, int64_t center_stride,
                 double *first, double *second, int threads) {
    int64_t chunks = chunks_of(shape), channels = shape->channels, parts = shape->nhwc ? chunks : channels;
    _Pragma("omp parallel num_threads(threads)") {
        unsigned state = flush_denormals(gradient != 0);
        _Pragma("omp for schedule(static)")
        for (int64_t at = 0; at < shape->segments * parts; at++) {
            int64_t segment = at / parts, part = at % parts;
            const float *center = centers ? centers + segment * center_stride : 0;
            if (shape->nhwc) {
                int64_t begin = row_of_chunk(shape, part, chunks), rows = row_of_chunk(shape, part + 1, chunks) - begin;
                int64_t start = segment * shape->rows + begin;
                double *plain = first + at * channels, *products = second + at * channels;
                BY_DTYPE(chunk(gradient, x, start, rows, channels, bf16, center, plain, products));
            } else {
                center = center ? center + part : 0;
                BY_DTYPE(row(gradient, x, at * shape->rows, shape->rows, bf16, center, first + at, second + at));
            }
        }
        restore(state);
    }
}

/* Allocates doubles followed by floats, or returns NULL. Nothing is needed if there are no elements. */
static void *memory_for(int64_t elements, int64_t doubles, int64_t floats) {
    return elements ? malloc((size_t)doubles * sizeof(double) + (size_t)floats * sizeof(float)) : 0;
}
static int64_t elements_of(const Shape *shape) { return shape->segments * shape->rows * shape->channels; }

/* Adds the sums of all parts to those of the first. */
static void add_parts(double *sums, int64_t parts, int64_t channels) {
    for (int64_t part = 1; part < parts; part++)
        for (int64_t c = 0; c < channels; c++) sums[c] += sums[part * channels + c];
}

/* Merges the sums of all parts, and the squared differences from their means, into those of the first. */
static void join_parts(const Shape *shape, int64_t parts, double *sums, double *squares) {
    int64_t chunks = chunks_of(shape), channels = shape->channels;
    double before = (double)row_of_chunk(shape, 1, chunks);
    for (int64_t part = 1; part < parts; part++) {
        int64_t begin = row_of_chunk(shape, part % chunks, chunks);
        double rows = (double)(row_of_chunk(shape, part % chunks + 1, chunks) - begin);
        for (int64_t c = 0; c < channels; c++) {
            double apart = sums[part * channels + c] / rows - sums[c] / before;
            squares[c] += squares[part * channels + c] + apart * apart * (rows * before / (rows + before));
            sums[c] += sums[part * channels + c];
        }
        before += rows;
    }
}

/* out = (x - centers) * scales + offsets, or with a gradient: gradient * scales + (x - centers) * slopes + offsets. All
   coefficients are indexed by (segment, channel), with a segment stride of 0 or of the number of channels. */
typedef struct {
    const float *centers, *scales, *slopes, *offsets;
    int64_t stride, offset_stride; /* for all coefficients, and for the offsets */
} Coefficients;

INLINE void apply_to_row(const Coefficients *by, const void *gradient, const void *x, void *out, int64_t at,
                         int64_t count, int bf16, int64_t segment, int64_t channel, int is_channel) {
    const float *centers = by->centers + segment * by->stride + channel;
    const float *scales = by->scales + segment * by->stride + channel;
    const float *offsets = by->offsets + segment * by->offset_stride + channel;
    const float *slopes = gradient ? by->slopes + segment * by->stride + channel : centers;
    Vector center = all(*centers), scale = all(*scales), offset = all(*offsets), slope = all(*slopes);
    int64_t place = 0;
#define APPLY                                                                                                          \
    {                                                                                                                  \
        if (!is_channel) {                                                                                             \
            center = load(centers, place, 0), scale = load(scales, place, 0);                                          \
            offset = load(offsets, place, 0), slope = load(slopes, place, 0);                                          \
        }                                                                                                              \
        Vector apart = load(x, at + place, bf16) - center;                                                             \
        Vector found = gradient ? load(gradient, at + place, bf16 == 1) * scale + apart * slope : apart * scale;       \
        store(out, at + place, bf16 == 1, found + offset);                                                             \
    }
    for (; place + WIDTH <= count; place += WIDTH) APPLY
    if (place < count) {
        place = count - WIDTH; /* the last vector overlaps */
        APPLY
    }
#undef APPLY
}

static void apply(const Shape *shape, const Coefficients *by, const void *gradient, const void *x, void *out,
                  int threads) {
    int64_t channels = shape->channels, rows = shape->nhwc ? shape->rows : channels;
    int64_t count = shape->nhwc ? channels : shape->rows;
    _Pragma("omp parallel num_threads(threads)") {
        unsigned state = flush_denormals(gradient != 0);
        _Pragma("omp for schedule(static)")
        for (int64_t at = 0; at < shape->segments * rows; at++) {
            int64_t segment = at / rows, channel = shape->nhwc ? 0 : at % rows;
            if (gradient)
                BY_DTYPE(apply_to_row(by, gradient, x, out, at * count, count, bf16, segment, channel, !shape->nhwc));
            else
                SPECIALIZED(bf16, shape->bf16,
                            apply_to_row(by, 0, x, out, at * count, count, bf16, segment, channel, !shape->nhwc));
        }
        restore(state);
    }
}

/* Writes the output, and each channel's mean and 1 / sqrt(variance + eps), and updates the running statistics. Returns
   0 and writes nothing if there are no elements, if memory cannot be allocated, or if an exchange failed. `weight`,
   `bias` and `running_*` may be NULL. */
int batch_norm(const Shape *shape, const void *x, const float *weight, const float *bias, float *running_mean,
               float *running_variance, double momentum, double eps, void *out, float *means, float *inverses,
               int threads) {
    int64_t channels = shape->channels, parts = shape->segments * chunks_of(shape), count = parts * channels;
    double *first = memory_for(elements_of(shape), count * 2, channels * 2);
    if (!first) return 0;
    double *second = first + count, elements = (double)(shape->segments * shape->rows);
    float *scales = (float *)(second + count), *offsets = scales + channels;
    sums(shape, 0, x, 0, 0, first, second, threads);
    join_parts(shape, parts, first, second);
    if (shape->exchange && !shape->exchange(&elements, first, second)) return free(first), 0;
    for (int64_t c = 0; c < channels; c++) {
        double mean = first[c] / elements, inverse = inverses[c] = (float)inverse_of(second + c, elements, eps);
        means[c] = (float)mean;
        scales[c] = (float)((weight ? weight[c] : 1) * inverse);
        offsets[c] = bias ? bias[c] : 0;
        if (running_mean) running_mean[c] = (float)(momentum * mean + (1 - momentum) * running_mean[c]);
        if (running_variance)
            running_variance[c] = (float)(momentum * second[c] / (elements - 1) + (1 - momentum) * running_variance[c]);
    }
    Coefficients by = {.centers = means, .scales = scales, .offsets = offsets};
    apply(shape, &by, 0, x, out, threads);
    free(first);
    return 1;
}

/* Writes the gradients of the input, the weight and the bias, each of which may be NULL. Returns like `batch_norm`. */
int batch_norm_backward(const Shape *shape, const void *gradient, const void *x, const float *weight,
                        const float *means, const float *inverses, void *of_input, float *of_weight, float *of_bias,
                        int threads) {
    int64_t channels = shape->channels, parts = shape->segments * chunks_of(shape), count = parts * channels;
    double *first = memory_for(elements_of(shape), count * 2, channels * 3);
    if (!first) return 0;
    double *second = first + count, elements = (double)(shape->segments * shape->rows);
    float *scales = (float *)(second + count), *slopes = scales + channels, *offsets = slopes + channels;
    sums(shape, gradient, x, means, 0, first, second, threads);
    add_parts(first, parts, channels);
    add_parts(second, parts, channels);
    for (int64_t c = 0; c < channels; c++) {
        if (of_weight) of_weight[c] = (float)(second[c] * inverses[c]);
        if (of_bias) of_bias[c] = (float)first[c];
    }
    if (of_input && shape->exchange && !shape->exchange(&elements, first, second)) return free(first), 0;
    for (int64_t c = 0; c < channels; c++) {
        double plain = first[c], products = second[c], inverse = inverses[c];
        double scale = (weight ? weight[c] : 1) * inverse;
        scales[c] = (float)scale;
        slopes[c] = (float)(-scale * inverse * inverse * products / elements);
        offsets[c] = (float)(-scale * plain / elements);
    }
    Coefficients by = {.centers = means, .scales = scales, .slopes = slopes, .offsets = offsets};
    if (of_input) apply(shape, &by, gradient, x, of_input, threads);
    free(first);
    return 1;
}

/* Like `batch_norm`, with the statistics of each image's groups of channels. */
int group_norm(const Shape *shape, int64_t groups, const void *x, const float *weight, const float *bias, double eps,
               void *out, float *means, float *inverses, int threads) {
    int64_t channels = shape->channels, chunks = chunks_of(shape), width = channels / groups;
    int64_t count = shape->segments * chunks * channels, pairs = shape->segments * channels;
    double *first = memory_for(elements_of(shape), count * 2, pairs * 2 + channels);
    if (!first) return 0;
    double *second = first + count;
    float *scales = (float *)(second + count), *centers = scales + pairs, *offsets = centers + pairs;
    sums(shape, 0, x, 0, 0, first, second, threads);
    for (int64_t c = 0; c < channels; c++) offsets[c] = bias ? bias[c] : 0;
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t segment = 0; segment < shape->segments; segment++)
        join_parts(shape, chunks, first + segment * chunks * channels, second + segment * chunks * channels);
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t at = 0; at < shape->segments * groups; at++) {
        int64_t segment = at / groups, channel = at % groups * width, start = segment * chunks * channels;
        double rows = (double)shape->rows, elements = rows * (double)width, sum = 0, squares = 0;
        for (int64_t c = channel; c < channel + width; c++) sum += first[start + c];
        double mean = sum / elements;
        for (int64_t c = channel; c < channel + width; c++) {
            double apart = first[start + c] / rows - mean;
            squares += second[start + c] + rows * apart * apart;
        }
        double inverse = inverses[at] = (float)inverse_of(&squares, elements, eps);
        means[at] = (float)mean;
        for (int64_t c = channel; c < channel + width; c++) {
            centers[segment * channels + c] = (float)mean;
            scales[segment * channels + c] = (float)((weight ? weight[c] : 1) * inverse);
        }
    }
    Coefficients by = {.centers = centers, .scales = scales, .offsets = offsets, .stride = channels};
    apply(shape, &by, 0, x, out, threads);
    free(first);
    return 1;
}

/* Like `batch_norm_backward`. */
int group_norm_backward(const Shape *shape, int64_t groups, const void *gradient, const void *x, const float *weight,
                        const float *means, const float *inverses, void *of_input, float *of_weight, float *of_bias,
                        int threads) {
    int64_t channels = shape->channels, chunks = chunks_of(shape), width = channels / groups;
    int64_t count = shape->segments * chunks * channels, pairs = shape->segments * channels;
    double *first = memory_for(elements_of(shape), count * 2, pairs * 4);
    if (!first) return 0;
    double *second = first + count, elements = (double)(width * shape->rows);
    float *scales = (float *)(second + count), *centers = scales + pairs, *slopes = centers + pairs;
    float *offsets = slopes + pairs;
    for (int64_t at = 0; at < pairs; at++) centers[at] = means[at / channels * groups + at % channels / width];
    sums(shape, gradient, x, centers, channels, first, second, threads);
    /* Add the sums of all chunks of an image to those of its first. */
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t at = 0; at < shape->segments * groups; at++) {
        int64_t segment = at / groups, start = segment * chunks * channels, channel = at % groups * width;
        double plain = 0, products = 0, inverse = inverses[at];
        for (int64_t c = channel; c < channel + width; c++) {
            for (int64_t part = 1; part < chunks; part++) {
                first[start + c] += first[start + part * channels + c];
                second[start + c] += second[start + part * channels + c];
            }
            plain += (weight ? weight[c] : 1) * first[start + c];
            products += (weight ? weight[c] : 1) * second[start + c];
        }
        for (int64_t c = channel; c < channel + width; c++) {
            int64_t place = segment * channels + c;
            scales[place] = (float)((weight ? weight[c] : 1) * inverse);
            slopes[place] = (float)(-inverse * inverse * inverse * products / elements);
            offsets[place] = (float)(-inverse * plain / elements);
        }
    }
    for (int64_t c = 0; c < channels && (of_weight || of_bias); c++) {
        double plain = 0, products = 0;
        for (int64_t segment = 0; segment < shape->segments; segment++) {
            plain += first[segment * chunks * channels + c];
            products += second[segment * chunks * channels + c] * inverses[segment * groups + c / width];
        }
        if (of_weight) of_weight[c] = (float)products;
        if (of_bias) of_bias[c] = (float)plain;
    }
    Coefficients by = {.centers = centers, .scales = scales, .slopes = slopes, .offsets = offsets};
    by.stride = by.offset_stride = channels;
    if (of_input) apply(shape, &by, gradient, x, of_input, threads);
    free(first);
    return 1;
}

/* The mean of a contiguous row, and 1 / sqrt(variance + eps). An RMS norm has no mean: nothing is subtracted. */
INLINE void statistics_of_row(const void *x, int64_t at, int64_t width, double eps, int bf16, float *mean,
                              float *inverse) {
    const float none = 0;
    double sum, squares;
    row(0, x, at, width, bf16, mean ? 0 : &none, &sum, &squares);
    if (mean) *mean = (float)(sum / (double)width);
    *inverse = (float)inverse_of(&squares, (double)width, eps);
}

INLINE void normalized_row(const void *x, int64_t at, int64_t width, const float *weight, const float *bias, float mean,
                           float inverse, int bf16, void *out) {
    int64_t place = 0;
#define NORMALIZE                                                                                                      \
    {                                                                                                                  \
        Vector found = (load(x, at + place, bf16) - mean) * inverse;                                                   \
        if (weight) found *= load(weight, place, 0);                                                                   \
        if (bias) found += load(bias, place, 0);                                                                       \
        store(out, at + place, bf16, found);                                                                           \
    }
    for (; place + WIDTH <= width; place += WIDTH) NORMALIZE
    if (place < width) {
        place = width - WIDTH; /* the last vector overlaps */
        NORMALIZE
    }
#undef NORMALIZE
}

/* Normalizes `rows` rows of `width` elements. Writes each row's mean and 1 / sqrt(variance + eps). Computes an RMS norm
   if `means` is NULL; likewise in the backward. */
void layer_norm(const void *x, int64_t rows, int64_t width, int64_t is_bf16, const float *weight, const float *bias,
                double eps, void *out, float *means, float *inverses, int threads) {
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t at = 0; at < rows; at++) {
        float *mean = means ? means + at : 0;
        SPECIALIZED(bf16, is_bf16, {
            statistics_of_row(x, at * width, width, eps, bf16, mean, inverses + at);
            normalized_row(x, at * width, width, weight, bias, mean ? *mean : 0, inverses[at], bf16, out);
        });
    }
}

/* The gradient of a row. Adds its contributions to the gradients of weight and bias to `of_weight` and `of_bias`. */
INLINE void gradient_of_row(const void *gradient, const void *x, int64_t at, int64_t width, const float *weight,
                            const float *center, float inverse, int bf16, void *of_input, float *of_weight,
                            float *of_bias) {
    const float mean = center ? *center : 0;
    Vector plain[PARTS] = {{0}}, products[PARTS] = {{0}}, mask[PARTS], normal, given;
    int64_t place = 0;
#define READ(AT)                                                                                                       \
    normal = (load(x, at + (AT), bf16) - mean) * inverse;                                                              \
    given = load(gradient, at + (AT), bf16);
#define ADD(MASK)                                                                                                      \
    FOR_PARTS {                                                                                                        \
        int64_t here = place + part * WIDTH;                                                                           \
        READ(here)                                                                                                     \
        given = given MASK;                                                                                            \
        store(of_weight, here, 0, load(of_weight, here, 0) + given * normal);                                          \
        store(of_bias, here, 0, load(of_bias, here, 0) + given);                                                       \
        if (weight) given *= load(weight, here, 0);                                                                    \
        plain[part] += given;                                                                                          \
        products[part] += given * normal;                                                                              \
    }
    for (; place + LANES <= width; place += LANES) ADD()
    if (place < width) {
        FOR_PARTS mask[part] = last_lanes(width - place, part);
        place = width - LANES;
        ADD(* mask[part])
    }
    if (!of_input) return;
    float offset = center ? (float)(sum_of(plain) / (double)width) : 0;
    float slope = (float)(sum_of(products) / (double)width);
#define WRITE                                                                                                          \
    {                                                                                                                  \
        READ(place)                                                                                                    \
        if (weight) given *= load(weight, place, 0);                                                                   \
        store(of_input, at + place, bf16, (given - offset - normal * slope) * inverse);                                \
    }
    for (place = 0; place + WIDTH <= width; place += WIDTH) WRITE
    if (place < width) {
        place = width - WIDTH;
        WRITE
    }
#undef READ
#undef ADD
#undef WRITE
}

/* Writes the gradients of the input, the weight and the bias, each of which may be NULL. Returns like `batch_norm`. */
int layer_norm_backward(const void *gradient, const void *x, int64_t rows, int64_t width, int64_t is_bf16,
                        const float *weight, const float *means, const float *inverses, void *of_input,
                        float *of_weight, float *of_bias, int threads) {
    int64_t length = most(LEAST_ROWS, divided(rows, CHUNKS)), chunks = divided(rows, length);
    int64_t count = chunks * width;
    double *first = memory_for(rows * width, count * 2, count * 2);
    if (!first) return 0;
    double *second = first + count;
    float *summed = (float *)(second + count);
    memset(first, 0, (size_t)count * 2 * sizeof *first);
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t part = 0; part < chunks; part++) {
        float *products = summed + part * width * 2, *plain = products + width;
        for (int64_t start = part * length; start < least(rows, (part + 1) * length); start += LEAST_ROWS) {
            memset(products, 0, (size_t)width * 2 * sizeof *summed);
            for (int64_t at = start; at < least(start + LEAST_ROWS, least(rows, (part + 1) * length)); at++) {
                const float *mean = means ? means + at : 0;
                SPECIALIZED(bf16, is_bf16, gradient_of_row(gradient, x, at * width, width, weight, mean, inverses[at], bf16,
                                                           of_input, products, plain));
            }
            for (int64_t c = 0; c < width; c++) {
                first[part * width + c] += products[c];
                second[part * width + c] += plain[c];
            }
        }
    }
    add_parts(first, chunks, width);
    add_parts(second, chunks, width);
    for (int64_t c = 0; c < width; c++) {
        if (of_weight) of_weight[c] = (float)first[c];
        if (of_bias) of_bias[c] = (float)second[c];
    }
    free(first);
    return 1;
}
