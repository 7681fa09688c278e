/* Batch norm, group norm and layer norm, forward and backward, of tensors in fp32 or bf16.

   A forward reads a tensor for its statistics, and again for the result; a backward reads two tensors twice. Sums have
   16 lanes in fp32 over at most 16 rows, or over 1,024 neighbours, and go on in double precision. How a tensor is
   divided depends on its shape alone, so a result depends neither on the number of threads nor on the width of vectors,
   but for how the compiler fuses products with sums.
   A part has its sum and the squared differences from its own mean, so equal elements have no variance however large
   they are.

   The activation after a batch or group norm, and a sum before a ReLU, are computed in the same passes. A ReLU's
   derivative follows from its output, or where nothing is added from the norm's, which is computed once more, as for
   SiLU and hardswish.

   Statistics of batch and group norms belong to (s, c): a segment s, and a channel c. Tensors are in NHWC, as rows of
   channels, or in NCHW, where a row is one channel of one image. A batch norm in NHWC has all rows in one segment. In
   all others, a segment is an image. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "denormals.h"
#include "elements.h"
#include "fp32_functions.h"
#include "threads.h"

#define LANES 16
#define ROWS 16         /* rows of which fp32 sums are taken */
#define NEIGHBOURS 1024 /* elements of a contiguous row, likewise */
#define SOME_ROWS 32    /* rows whose mean is subtracted before squares are taken */
#define SOME_NEIGHBOURS 128
#define ROWS_OF_A_CHUNK 256 /* about as many, where there are few rows */
#define LEAST_ROWS 32       /* of a chunk. Of as many, fp32 sums are taken in the backward of a layer norm */
#define CHUNKS 128          /* about as many, where there are many rows */
#define SHARED 8            /* chunks that 2, 4 or 8 threads share equally */

#define PARTS (LANES / WIDTH)
#define FOR_PARTS _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)

typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

typedef struct {
    int64_t segments, rows, channels; /* rows of a segment; in NCHW the elements of a channel of an image */
    int64_t nhwc, bf16;
} Shape;

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

/* 1 in the last `count` of 16 lanes, else 0: those of a row's last lanes which the ones before them do not have. */
INLINE Vector last_lanes(int64_t count, int part) {
    Vector mask = {0};
    for (int lane = 0; lane < WIDTH; lane++) mask[lane] = part * WIDTH + lane >= LANES - count;
    return mask;
}

/* Into how many chunks the rows of a segment are divided. They are equally long, and their number is one that threads
   share equally, unless segments are many, or such a number. */
static int64_t chunks_of(const Shape *shape) {
    if (!shape->nhwc || !shape->segments) return 1;
    int64_t chunks = least(shape->rows / ROWS_OF_A_CHUNK, CHUNKS / shape->segments), most = shape->rows / LEAST_ROWS;
    if (shape->segments < CHUNKS && shape->segments % SHARED) chunks = (chunks / SHARED + 1) * SHARED;
    chunks = least(chunks, most);
    return chunks > 1 ? chunks : 1;
}

/* The first row of a chunk. */
INLINE int64_t row_of_chunk(const Shape *shape, int64_t chunk, int64_t chunks) { return shape->rows * chunk / chunks; }

/* A ReLU, and the like: what is 0 or less times a slope that is not negative, and at most a ceiling. Or SiLU or
   hardswish. */
typedef struct {
    double slope, ceiling; /* the ceiling may be NaN: there is none */
    int64_t kind;
} Activation;
/* Kinds. Of outputs, too: a ReLU or nothing behind a sum. Of gradients: a ReLU whose derivative follows from its
   output. */
enum { ADDED = -2, OF_OUTPUT, NONE, RELU, SILU, HARDSWISH };

/* A vector, and 0 where another one is 0 or less; a NaN is not. */
INLINE Vector where_positive(Vector value, Vector of) { return (Vector)((Words)value & ~(Words)(of <= 0)); }

INLINE int is_plain(const Activation *relu) { return relu->slope == 0 && relu->ceiling != relu->ceiling; }

/* At least 0, and at most 6. */
INLINE Vector bounded(Vector value) {
    value = CHOOSE(value < 0, all(0), value);
    return CHOOSE(value > 6, all(6), value);
}

/* The output of an activation of this kind. The input is one that `store` has rounded, as are results in between, so as
   to give what torch's functions give one after another. A plain ReLU gives that without, and SiLU is nearer without. */
INLINE Vector activated(int kind, const Activation *by, Vector value, int bf16) {
    if (kind == SILU) return value * sigmoid(value);
    if (kind == RELU && is_plain(by)) return where_positive(value, value);
    value = rounded(value, bf16);
    if (kind == HARDSWISH) return value * bounded(value + 3) / 6;
    value = CHOOSE(value <= 0, by->slope == 0 ? all(0) : value * (float)by->slope, value);
    return CHOOSE(value > (float)by->ceiling, all((float)by->ceiling), value);
}

/* The gradient of its input, from the input, or for a ReLU from the output. */
INLINE Vector gradient_of(int kind, const Activation *by, Vector gradient, Vector of, int bf16) {
    if (kind == SILU) {
        Vector e = exponential(-magnitude(of)), larger = reciprocal(1 + e), smaller = e * larger;
        return gradient * (CHOOSE(of < 0, smaller, larger) + of * larger * smaller);
    }
    if (kind == RELU && is_plain(by)) return where_positive(gradient, of);
    of = rounded(of, bf16);
    if (kind == HARDSWISH) {
        Vector slope = CHOOSE(of <= -3, all(0), of / 3 + 0.5f);
        return gradient * CHOOSE(of >= 3, all(1), slope);
    }
    Vector low = by->slope == 0 ? all(0) : rounded(gradient * (float)by->slope, bf16);
    return CHOOSE(of <= 0, low, (Vector)((Words)gradient & ~(Words)(of >= (float)by->ceiling)));
}

/* Of the gradient of an activation behind a norm: by (segment, channel), with a stride between segments, what gives its
   input; or a ReLU's output. And where the gradient of its input goes: only that of a ReLU is computed again. */
typedef struct {
    const Activation *activation;
    const float *scales, *offsets;
    int64_t stride;
    const void *output;
    void *of_input;
} Behind;

INLINE Vector gradient_behind(int kind, const Behind *by, Vector gradient, Vector apart, Vector scale, Vector offset,
                              int64_t at, int bf16) {
    if (kind == NONE) return gradient;
    Vector of = kind == OF_OUTPUT ? load(by->output, at, bf16) : apart * scale + offset;
    gradient = gradient_of(kind == OF_OUTPUT ? RELU : kind, by->activation, gradient, of, bf16);
    if (kind != RELU && by->of_input) store(by->of_input, at, bf16, gradient);
    return kind == HARDSWISH ? rounded(gradient, bf16) : gradient;
}

/* What is summed of `wide` vectors of channels, for some rows in NHWC: x - shift and its square, or gradients and their
   products with x - shift. Arrays would stay in memory, so the sums have names. */
INLINE void sums_of_tile(const void *x, const void *gradient, int64_t at, int64_t rows, int64_t channels, int wide,
                         int bf16, int kind, const Behind *by, const Vector *shift, const Vector *scale,
                         const Vector *offset, Vector *first, Vector *second) {
    Vector first0 = {0}, first1 = {0}, first2 = {0}, first3 = {0};
    Vector second0 = {0}, second1 = {0}, second2 = {0}, second3 = {0};
    Vector shift0 = shift[0], shift1 = shift[1], shift2 = shift[2], shift3 = shift[3];
#define ADD(I)                                                                                                         \
    if (I < wide) {                                                                                                    \
        Vector apart = load(x, at + I * WIDTH, bf16) - shift##I;                                                       \
        Vector factor = gradient ? load(gradient, at + I * WIDTH, bf16) : apart;                                       \
        factor = gradient_behind(kind, by, factor, apart, scale[I], offset[I], at + I * WIDTH, bf16);                  \
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

/* Sums, in double precision, of x in a chunk's channels, and of squared differences from their means, or with `centers`
   of gradients and their products with x - centers. What is squared is x less the mean of some rows, so that little is
   lost in fp32. */
INLINE void tile(const void *gradient, const void *x, int64_t start, int64_t rows, int64_t channels, int64_t channel,
                 int wide, int bf16, int kind, const Behind *by, const float *centers, double *sums, double *products) {
    Vector shift[4] = {{0}}, scale[4] = {{0}}, offset[4] = {{0}}, first[4], second[4];
    double plain[4 * WIDTH] = {0}, multiplied[4 * WIDTH] = {0};
    float moved[4 * WIDTH];
    int count = wide * WIDTH;
    int64_t at = start * channels + channel;
    for (int i = 0; i < wide; i++) {
        shift[i] = centers ? load(centers, channel + i * WIDTH, 0) : load(x, at + i * WIDTH, bf16);
        if (kind > NONE) {
            scale[i] = load(by->scales, channel + i * WIDTH, 0);
            offset[i] = load(by->offsets, channel + i * WIDTH, 0);
        }
    }
    if (!centers) {
        int64_t some = least(rows, SOME_ROWS);
        sums_of_tile(x, 0, at, some, channels, wide, bf16, 0, 0, shift, scale, offset, first, second);
        for (int i = 0; i < wide; i++) shift[i] += first[i] / (float)some;
    }
    for (int64_t row = 0; row < rows; row += ROWS) {
        sums_of_tile(x, gradient, at + row * channels, least(ROWS, rows - row), channels, wide, bf16, kind, by, shift,
                     scale, offset, first, second);
        add_to(plain, first, count);
        add_to(multiplied, second, count);
    }
    memcpy(moved, shift, sizeof moved);
    for (int i = 0; i < count; i++) {
        sums[channel + i] = centers ? plain[i] : plain[i] + (double)rows * moved[i];
        products[channel + i] = centers ? multiplied[i] : multiplied[i] - plain[i] * plain[i] / (double)rows;
    }
}

/* The sums of all channels of a chunk, in tiles of four, two and one vectors. The last may be computed twice. */
INLINE void chunk(const void *gradient, const void *x, int64_t start, int64_t rows, int64_t channels, int bf16, int kind,
                  const Behind *by, const float *centers, double *sums, double *products) {
    int64_t channel = 0;
    for (; channel + 4 * WIDTH <= channels; channel += 4 * WIDTH)
        tile(gradient, x, start, rows, channels, channel, 4, bf16, kind, by, centers, sums, products);
    for (; channel + 2 * WIDTH <= channels; channel += 2 * WIDTH)
        tile(gradient, x, start, rows, channels, channel, 2, bf16, kind, by, centers, sums, products);
    for (; channel < channels; channel += WIDTH)
        tile(gradient, x, start, rows, channels, least(channel, channels - WIDTH), 1, bf16, kind, by, centers, sums,
             products);
}

/* Sums of neighbours, as `sums_of_tile`, in one part of 16 lanes. */
INLINE void sums_of_lanes(const void *x, const void *gradient, int64_t at, int64_t count, int bf16, int kind,
                          const Behind *by, float shift, float scale, float offset, int part, Vector *first,
                          Vector *second) {
    Vector first0 = {0}, first1 = {0}, first2 = {0}, first3 = {0};
    Vector second0 = {0}, second1 = {0}, second2 = {0}, second3 = {0};
    int64_t place = 0;
#define ADD(I, MASK)                                                                                                   \
    {                                                                                                                  \
        Vector apart = load(x, at + place + I * LANES, bf16) - shift;                                                  \
        Vector factor = gradient ? load(gradient, at + place + I * LANES, bf16) : apart;                               \
        factor = gradient_behind(kind, by, factor, apart, all(scale), all(offset), at + place + I * LANES, bf16) MASK; \
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

/* Sums of neighbours, of one part of the lanes after another: more sums than registers would lie in memory. */
INLINE void sums_of_neighbours(const void *x, const void *gradient, int64_t at, int64_t count, int bf16, int kind,
                               const Behind *by, float shift, float scale, float offset, double *first, double *second) {
    Vector firsts[PARTS], seconds[PARTS];
    for (int part = 0; part < PARTS; part++)
        sums_of_lanes(x, gradient, at + part * WIDTH, count, bf16, kind, by, shift, scale, offset, part, firsts + part,
                      seconds + part);
    *first = sum_of(firsts);
    *second = sum_of(seconds);
}

/* The same as `tile`, of a contiguous row of 16 elements or more. */
INLINE void row(const void *gradient, const void *x, int64_t at, int64_t count, int bf16, int kind, const Behind *by,
                int64_t channel, const float *center, double *sums, double *products) {
    float scale = kind > NONE ? by->scales[channel] : 0, offset = kind > NONE ? by->offsets[channel] : 0;
    double first, second, plain = 0, multiplied = 0;
    float shift = center ? *center : load(x, at, bf16)[0];
    if (!center) {
        int64_t some = least(count, SOME_NEIGHBOURS);
        sums_of_neighbours(x, 0, at, some, bf16, 0, 0, shift, 0, 0, &first, &second);
        shift += (float)(first / (double)some);
    }
    for (int64_t start = 0; start < count; start += NEIGHBOURS) {
        int64_t block = count - start < NEIGHBOURS + LANES ? count - start : NEIGHBOURS; /* none of less than 16 */
        sums_of_neighbours(x, gradient, at + start, block, bf16, kind, by, shift, scale, offset, &first, &second);
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

/* 1 / sqrt(variance + eps) of what has these squared differences. Rounding may have made them negative; a NaN stays. */
INLINE double inverse_of(double *squares, double count, double eps) {
    *squares = *squares < 0 ? 0 : *squares;
    return 1 / __builtin_sqrt(*squares / count + eps);
}

/* What a norm multiplies a channel by, which has this weight, or NULL. */
INLINE float scale_of(const float *weight, float inverse) { return (float)((weight ? (double)*weight : 1) * inverse); }

/* The place of the statistics of (segment, channel). `groups` is 0 for a batch norm, whose segments share them. */
INLINE int64_t statistic_of(const Shape *shape, int64_t groups, int64_t at) {
    int64_t channels = shape->channels, channel = at % channels;
    return groups ? at / channels * groups + channel / (channels / groups) : channel;
}

/* The sums of each segment's chunks: [segment, chunk, c]. */
INLINE void sums_by(const Shape *shape, const void *gradient, const void *x, int bf16, int kind, const Behind *by,
                    const float *centers, int64_t center_stride, double *first, double *second, int threads) {
    int64_t chunks = chunks_of(shape), channels = shape->channels;
    int64_t count = shape->segments * (shape->nhwc ? chunks : channels);
    _Pragma("omp parallel num_threads(threads)") {
        unsigned state = flush_denormals(gradient != 0);
        _Pragma("omp for schedule(static)")
        for (int64_t at = 0; at < count; at++) {
            int64_t segment = at / (shape->nhwc ? chunks : channels), channel = shape->nhwc ? 0 : at % channels;
            const float *center = centers ? centers + segment * center_stride + channel : 0;
            Behind here = {0};
            if (kind) here = *by, here.scales += segment * by->stride;
            if (shape->nhwc) {
                int64_t begin = row_of_chunk(shape, at % chunks, chunks);
                int64_t rows = row_of_chunk(shape, at % chunks + 1, chunks) - begin, start = segment * shape->rows + begin;
                chunk(gradient, x, start, rows, channels, bf16, kind, &here, center, first + at * channels,
                      second + at * channels);
            } else
                row(gradient, x, at * shape->rows, shape->rows, bf16, kind, &here, channel, center, first + at,
                    second + at);
        }
        restore(state);
    }
}

static void sums(const Shape *shape, const void *gradient, const void *x, int kind, const Behind *by,
                 const float *centers, int64_t center_stride, double *first, double *second, int threads) {
#define SUMS(GRADIENT, BF16, KIND)                                                                                     \
    sums_by(shape, GRADIENT, x, BF16, KIND, by, centers, center_stride, first, second, threads)
#define SUMS_OF(GRADIENT, KIND) (shape->bf16 ? SUMS(GRADIENT, 1, KIND) : SUMS(GRADIENT, 0, KIND))
    if (!gradient)
        SUMS_OF(0, NONE);
    else if (kind == NONE)
        SUMS_OF(gradient, NONE);
    else if (kind == RELU)
        SUMS_OF(gradient, RELU);
    else if (kind == SILU)
        SUMS_OF(gradient, SILU);
    else if (kind == HARDSWISH)
        SUMS_OF(gradient, HARDSWISH);
    else
        SUMS_OF(gradient, OF_OUTPUT);
#undef SUMS
#undef SUMS_OF
}

/* Memory for numbers in double precision, and behind these for others in fp32, or NULL. No elements need none. */
static void *memory_for(int64_t elements, int64_t doubles, int64_t floats) {
    return elements ? malloc((size_t)doubles * sizeof(double) + (size_t)floats * sizeof(float)) : 0;
}
static int64_t elements_of(const Shape *shape) { return shape->segments * shape->rows * shape->channels; }

/* Makes the sums of some parts those of the first one. */
static void add_parts(double *sums, int64_t parts, int64_t channels) {
    for (int64_t part = 1; part < parts; part++)
        for (int64_t c = 0; c < channels; c++) sums[c] += sums[part * channels + c];
}

/* Makes the sums of some parts, and the squared differences from their means, those of the first one. */
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
   coefficients are of (segment, channel), with a stride of 0 or of the channels between segments. To an output `added`
   is added, unless that is NULL, and its activation is taken. The gradient is that of the activation's output. */
typedef struct {
    const float *centers, *scales, *slopes, *offsets;
    int64_t stride, offset_stride; /* the first is that of all but the offsets */
    const void *added;
    const Activation *activation;
    const float *input_offsets; /* of the activation's input, as in `Behind` */
} Coefficients;

INLINE void apply_to_row(const Coefficients *by, const void *gradient, const void *x, void *out, int64_t at,
                         int64_t count, int bf16, int kind, int64_t segment, int64_t channel, int is_channel) {
    const float *centers = by->centers + segment * by->stride + channel;
    const float *scales = by->scales + segment * by->stride + channel;
    const float *offsets = by->offsets + segment * by->offset_stride + channel;
    const float *slopes = gradient ? by->slopes + segment * by->stride + channel : centers;
    const float *input_offsets = gradient && kind ? by->input_offsets + channel : centers;
    Vector center = all(*centers), scale = all(*scales), offset = all(*offsets), slope = all(*slopes);
    Vector input_offset = all(*input_offsets);
    int64_t place;
    Vector found, last = {0};
#define COMPUTE                                                                                                        \
    {                                                                                                                  \
        if (!is_channel) {                                                                                             \
            center = load(centers, place, 0), scale = load(scales, place, 0);                                          \
            offset = load(offsets, place, 0), slope = load(slopes, place, 0);                                          \
            input_offset = load(input_offsets, place, 0);                                                              \
        }                                                                                                              \
        Vector apart = load(x, at + place, bf16) - center;                                                             \
        if (gradient) {                                                                                                \
            Vector given = load(gradient, at + place, bf16);                                                           \
            if (kind) given = gradient_of(kind, by->activation, given, apart * scale + input_offset, bf16);            \
            found = given * scale + apart * slope + offset;                                                            \
        } else {                                                                                                       \
            found = apart * scale + offset;                                                                            \
            if (kind == ADDED) found = rounded(found, bf16) + load(by->added, at + place, bf16);                       \
            if (kind == ADDED ? by->activation != 0 : kind)                                                            \
                found = activated(kind == ADDED ? RELU : kind, by->activation, found, bf16);                           \
        }                                                                                                              \
    }
    if (count % WIDTH) { /* some are written twice, and computed before: the result may lie where the gradient does */
        place = count - WIDTH;
        COMPUTE
        last = found;
    }
    for (place = 0; place + WIDTH <= count; place += WIDTH) {
        COMPUTE
        store(out, at + place, bf16, found);
    }
    if (count % WIDTH) store(out, at + count - WIDTH, bf16, last);
#undef COMPUTE
}

static void apply(const Shape *shape, const Coefficients *by, const void *gradient, const void *x, void *out, int kind,
                  int threads) {
    int64_t channels = shape->channels, rows = shape->nhwc ? shape->rows : channels;
    int64_t count = shape->nhwc ? channels : shape->rows;
    _Pragma("omp parallel num_threads(threads)") {
        unsigned state = flush_denormals(gradient != 0);
        _Pragma("omp for schedule(static)")
        for (int64_t at = 0; at < shape->segments * rows; at++) {
            int64_t segment = at / rows, channel = shape->nhwc ? 0 : at % rows;
#define APPLY(GRADIENT, BF16, KIND)                                                                                    \
    apply_to_row(by, GRADIENT, x, out, at * count, count, BF16, KIND, segment, channel, !shape->nhwc)
#define APPLY_BY(GRADIENT, KIND) (shape->bf16 ? APPLY(GRADIENT, 1, KIND) : APPLY(GRADIENT, 0, KIND))
            if (gradient)
                kind == RELU ? APPLY_BY(gradient, RELU) : APPLY_BY(gradient, NONE);
            else if (kind == NONE)
                APPLY_BY(0, NONE);
            else if (kind == RELU)
                APPLY_BY(0, RELU);
            else if (kind == SILU)
                APPLY_BY(0, SILU);
            else if (kind == HARDSWISH)
                APPLY_BY(0, HARDSWISH);
            else
                APPLY_BY(0, ADDED);
#undef APPLY
#undef APPLY_BY
        }
        restore(state);
    }
}

/* Writes the output of a norm by its statistics, with what is `added` to it, or NULL, and through an activation, unless
   that is NULL: a ReLU where something is added. `groups` is 0 for a batch norm. Returns 0 if there is no memory. */
int norm_output(const Shape *shape, int64_t groups, const Activation *activation, const void *x, const float *weight,
                const float *bias, const float *means, const float *inverses, const void *added, void *out,
                int threads) {
    int64_t channels = shape->channels, pairs = groups ? shape->segments * channels : channels;
    float *scales = memory_for(elements_of(shape), 0, pairs * 2 + channels);
    if (!scales) return 0;
    if (activation && !activation->kind) activation = 0;
    float *centers = scales + pairs, *offsets = centers + pairs;
    for (int64_t c = 0; c < channels; c++) offsets[c] = bias ? bias[c] : 0;
    for (int64_t at = 0; at < pairs; at++) {
        int64_t place = statistic_of(shape, groups, at);
        centers[at] = means[place];
        scales[at] = scale_of(weight ? weight + at % channels : 0, inverses[place]);
    }
    Coefficients by = {.centers = centers, .scales = scales, .offsets = offsets, .stride = groups ? channels : 0};
    by.added = added, by.activation = activation;
    apply(shape, &by, 0, x, out, added ? ADDED : activation ? (int)activation->kind : NONE, threads);
    free(scales);
    return 1;
}

/* Writes the output, unless `out` is NULL, and each channel's mean and 1 / sqrt(variance + eps), and moves the running
   statistics on. Returns 0, and writes nothing, if there are no elements, or no memory for the sums. `weight`, `bias`
   and `running_*` may be NULL. */
int batch_norm(const Shape *shape, const void *x, const float *weight, const float *bias, float *running_mean,
               float *running_variance, double momentum, double eps, void *out, float *means, float *inverses,
               int threads) {
    int64_t channels = shape->channels, parts = shape->segments * chunks_of(shape), count = parts * channels;
    double *first = memory_for(elements_of(shape), count * 2, 0);
    if (!first) return 0;
    double *second = first + count, elements = (double)(shape->segments * shape->rows);
    sums(shape, 0, x, NONE, 0, 0, 0, first, second, threads);
    join_parts(shape, parts, first, second);
    for (int64_t c = 0; c < channels; c++) {
        double mean = first[c] / elements;
        inverses[c] = (float)inverse_of(second + c, elements, eps);
        means[c] = (float)mean;
    }
    int is_done = !out || norm_output(shape, 0, 0, x, weight, bias, means, inverses, 0, out, threads);
    for (int64_t c = 0; c < channels && is_done; c++) {
        double mean = first[c] / elements;
        if (running_mean) running_mean[c] = (float)(momentum * mean + (1 - momentum) * running_mean[c]);
        if (running_variance)
            running_variance[c] = (float)(momentum * second[c] / (elements - 1) + (1 - momentum) * running_variance[c]);
    }
    free(first);
    return is_done;
}

/* Of a backward: the gradient is that of the output of an activation, unless this is NULL: of a ReLU behind the sum of
   the norm and of something else, whose gradient is written to `of_added` by the `output`, or if that is NULL, of one
   right behind the norm, which has this bias. */
typedef struct {
    const Shape *shape;
    const Activation *activation;
    const void *gradient, *x;
    const float *weight, *means, *inverses, *bias;
    const void *output;
    void *of_added, *of_input;
    float *of_weight, *of_bias;
} Backward;

/* Sums gradients and their products with x - centers; by (segment, channel), with a stride between segments. */
static void sums_of_gradients(const Backward *of, const float *centers, const float *scales, const float *offsets,
                              int64_t stride, double *first, double *second, int threads) {
    int kind = !of->activation ? NONE : of->output ? OF_OUTPUT : (int)of->activation->kind;
    Behind behind = {.activation = of->activation, .scales = scales, .offsets = offsets, .stride = stride};
    behind.output = of->output, behind.of_input = of->output ? of->of_added : of->of_input;
    sums(of->shape, of->gradient, of->x, kind, &behind, centers, stride, first, second, threads);
}

/* Writes the gradient of the input, by that of the norm's output if the sums have left it. */
static void write_gradient(const Backward *of, Coefficients by, const float *offsets, int threads) {
    int kind = of->activation ? (int)of->activation->kind : NONE;
    const void *gradient = of->output ? of->of_added : kind > RELU ? of->of_input : of->gradient;
    by.activation = of->activation, by.input_offsets = offsets;
    apply(of->shape, &by, gradient, of->x, of->of_input, of->output ? NONE : kind, threads);
}

static int gradients_of_batch_norm(const Backward *of, int threads) {
    const Shape *shape = of->shape;
    int64_t channels = shape->channels, parts = shape->segments * chunks_of(shape), count = parts * channels;
    double *first = memory_for(elements_of(shape), count * 2, channels * 4);
    if (!first) return 0;
    double *second = first + count, elements = (double)(shape->segments * shape->rows);
    float *scales = (float *)(second + count), *slopes = scales + channels, *offsets = slopes + channels;
    float *biases = offsets + channels;
    for (int64_t c = 0; c < channels; c++) {
        scales[c] = scale_of(of->weight ? of->weight + c : 0, of->inverses[c]);
        biases[c] = of->bias ? of->bias[c] : 0;
    }
    sums_of_gradients(of, of->means, scales, biases, 0, first, second, threads);
    add_parts(first, parts, channels);
    add_parts(second, parts, channels);
    for (int64_t c = 0; c < channels; c++) {
        double plain = first[c], products = second[c], inverse = of->inverses[c];
        double scale = (of->weight ? of->weight[c] : 1) * inverse;
        if (of->of_weight) of->of_weight[c] = (float)(products * inverse);
        if (of->of_bias) of->of_bias[c] = (float)plain;
        slopes[c] = (float)(-scale * inverse * inverse * products / elements);
        offsets[c] = (float)(-scale * plain / elements);
    }
    Coefficients by = {.centers = of->means, .scales = scales, .slopes = slopes, .offsets = offsets};
    if (of->of_input) write_gradient(of, by, biases, threads);
    free(first);
    return 1;
}

static int gradients_of_group_norm(const Backward *of, int64_t groups, int threads) {
    const Shape *shape = of->shape;
    const float *weight = of->weight;
    int64_t channels = shape->channels, chunks = chunks_of(shape), width = channels / groups;
    int64_t count = shape->segments * chunks * channels, pairs = shape->segments * channels;
    double *first = memory_for(elements_of(shape), count * 2, pairs * 4 + channels);
    if (!first) return 0;
    double *second = first + count, elements = (double)(width * shape->rows);
    float *scales = (float *)(second + count), *centers = scales + pairs, *slopes = centers + pairs;
    float *offsets = slopes + pairs, *biases = offsets + pairs;
    for (int64_t c = 0; c < channels; c++) biases[c] = of->bias ? of->bias[c] : 0;
    for (int64_t at = 0; at < pairs; at++) {
        int64_t place = statistic_of(shape, groups, at);
        centers[at] = of->means[place];
        scales[at] = scale_of(weight ? weight + at % channels : 0, of->inverses[place]);
    }
    sums_of_gradients(of, centers, scales, biases, channels, first, second, threads);
    /* The sums of all chunks of an image become those of its first. */
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t at = 0; at < shape->segments * groups; at++) {
        int64_t segment = at / groups, start = segment * chunks * channels, channel = at % groups * width;
        double plain = 0, products = 0, inverse = of->inverses[at];
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
            slopes[place] = (float)(-inverse * inverse * inverse * products / elements);
            offsets[place] = (float)(-inverse * plain / elements);
        }
    }
    for (int64_t c = 0; c < channels && (of->of_weight || of->of_bias); c++) {
        double plain = 0, products = 0;
        for (int64_t segment = 0; segment < shape->segments; segment++) {
            plain += first[segment * chunks * channels + c];
            products += second[segment * chunks * channels + c] * of->inverses[segment * groups + c / width];
        }
        if (of->of_weight) of->of_weight[c] = (float)products;
        if (of->of_bias) of->of_bias[c] = (float)plain;
    }
    Coefficients by = {.centers = centers, .scales = scales, .slopes = slopes, .offsets = offsets};
    by.stride = by.offset_stride = channels;
    if (of->of_input) write_gradient(of, by, biases, threads);
    free(first);
    return 1;
}

/* Writes the gradients of the input, the weight and the bias, each of which may be NULL, and of what was added. `groups`
   is 0 for a batch norm. Returns as `batch_norm`. */
int norm_activation_backward(const Shape *shape, int64_t groups, const Activation *activation, const void *gradient,
                             const void *x, const float *weight, const float *means, const float *inverses,
                             const float *bias, const void *output, void *of_added, void *of_input, float *of_weight,
                             float *of_bias, int threads) {
    Backward of = {.shape = shape, .activation = activation, .gradient = gradient, .x = x, .weight = weight};
    of.means = means, of.inverses = inverses, of.bias = bias, of.output = output;
    of.of_added = of_added, of.of_input = of_input, of.of_weight = of_weight, of.of_bias = of_bias;
    return groups ? gradients_of_group_norm(&of, groups, threads) : gradients_of_batch_norm(&of, threads);
}

int batch_norm_backward(const Shape *shape, const void *gradient, const void *x, const float *weight,
                        const float *means, const float *inverses, void *of_input, float *of_weight, float *of_bias,
                        int threads) {
    return norm_activation_backward(shape, 0, 0, gradient, x, weight, means, inverses, 0, 0, 0, of_input, of_weight,
                                    of_bias, threads);
}

int group_norm_backward(const Shape *shape, int64_t groups, const void *gradient, const void *x, const float *weight,
                        const float *means, const float *inverses, void *of_input, float *of_weight, float *of_bias,
                        int threads) {
    return norm_activation_backward(shape, groups, 0, gradient, x, weight, means, inverses, 0, 0, 0, of_input,
                                    of_weight, of_bias, threads);
}

/* As `batch_norm`, with the statistics of each image's groups of channels. */
int group_norm(const Shape *shape, int64_t groups, const void *x, const float *weight, const float *bias, double eps,
               void *out, float *means, float *inverses, int threads) {
    int64_t channels = shape->channels, chunks = chunks_of(shape), width = channels / groups;
    int64_t count = shape->segments * chunks * channels;
    double *first = memory_for(elements_of(shape), count * 2, 0);
    if (!first) return 0;
    double *second = first + count;
    sums(shape, 0, x, NONE, 0, 0, 0, first, second, threads);
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
        means[at] = (float)mean;
        inverses[at] = (float)inverse_of(&squares, elements, eps);
    }
    free(first);
    return !out || norm_output(shape, groups, 0, x, weight, bias, means, inverses, 0, out, threads);
}

/* The mean of a contiguous row, and 1 / sqrt(variance + eps). An RMS norm has no mean: nothing is subtracted. */
INLINE void statistics_of_row(const void *x, int64_t at, int64_t width, double eps, int bf16, float *mean,
                              float *inverse) {
    const float none = 0;
    double sum, squares;
    row(0, x, at, width, bf16, NONE, 0, 0, mean ? 0 : &none, &sum, &squares);
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
        place = width - WIDTH; /* some are written twice */
        NORMALIZE
    }
#undef NORMALIZE
}

/* Normalises `rows` of `width` elements. Writes each row's mean and 1 / sqrt(variance + eps). It is an RMS norm if
   `means` is NULL, as in its backward. */
void layer_norm(const void *x, int64_t rows, int64_t width, int64_t bf16, const float *weight, const float *bias,
                double eps, void *out, float *means, float *inverses, int threads) {
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t at = 0; at < rows; at++) {
        float *mean = means ? means + at : 0;
        if (bf16) {
            statistics_of_row(x, at * width, width, eps, 1, mean, inverses + at);
            normalized_row(x, at * width, width, weight, bias, mean ? *mean : 0, inverses[at], 1, out);
        } else {
            statistics_of_row(x, at * width, width, eps, 0, mean, inverses + at);
            normalized_row(x, at * width, width, weight, bias, mean ? *mean : 0, inverses[at], 0, out);
        }
    }
}

/* The gradient of a row, whose parts of the gradients of weight and bias are added to `of_weight` and `of_bias`. */
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

/* Writes the gradients of the input, the weight and the bias, each of which may be NULL. Returns as `batch_norm`. */
int layer_norm_backward(const void *gradient, const void *x, int64_t rows, int64_t width, int64_t bf16,
                        const float *weight, const float *means, const float *inverses, void *of_input,
                        float *of_weight, float *of_bias, int threads) {
    int64_t length = (rows + CHUNKS - 1) / CHUNKS, chunks;
    length = length > LEAST_ROWS ? length : LEAST_ROWS;
    chunks = (rows + length - 1) / length;
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
                if (bf16)
                    gradient_of_row(gradient, x, at * width, width, weight, mean, inverses[at], 1, of_input, products,
                                    plain);
                else
                    gradient_of_row(gradient, x, at * width, width, weight, mean, inverses[at], 0, of_input, products,
                                    plain);
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
