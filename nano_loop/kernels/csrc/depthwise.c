/* Gradients of depthwise convolutions of NHWC images, in fp32 or bf16: each channel has its own kernel.

   Channels are contiguous, so vectors hold neighboring channels, and the functions are memory-bound. Sums are in fp32
   over at most `PIXELS` pixels and a row, and are then accumulated in double precision. Images are partitioned based on
   their shape only, so results do not depend on the number of threads. */
#include <stdlib.h>

#include "elements.h"
#include "threads.h"

#define POSITIONS 64 /* maximum number of kernel positions */
#define PIXELS 128   /* approximate number of pixels per fp32 sum */
#define PARTS 16     /* number of parts for images, if there are fewer images */

typedef struct {
    int64_t images, channels, outputs, rows, columns, out_rows, out_columns; /* `outputs` equals `channels` */
    int64_t kernel[2], stride[2], padding[2], dilation[2]; /* of rows and of columns */
    int64_t bf16;
} Call;

/* The input row or column at a position of the kernel, which may be out of bounds. */
INLINE int64_t below(const Call *call, int axis, int64_t out, int64_t position) {
    return out * call->stride[axis] - call->padding[axis] + position * call->dilation[axis];
}

/* The output rows or columns that depend on an input row or column, and the kernel positions involved. */
typedef struct {
    int64_t count, out[POSITIONS], position[POSITIONS];
} Reached;

static void reach(const Call *call, int axis, int64_t place, int64_t outs, Reached *reached) {
    reached->count = 0;
    for (int64_t k = 0; k < call->kernel[axis]; k++) {
        int64_t moved = place + call->padding[axis] - k * call->dilation[axis];
        if (moved < 0 || moved % call->stride[axis] || moved / call->stride[axis] >= outs) continue;
        reached->out[reached->count] = moved / call->stride[axis];
        reached->position[reached->count++] = k;
    }
}

/* The gradient of an input pixel, for `wide` vectors of channels: gradients times weights. */
INLINE void pixel(const void *gradient, const float *weight, void *out, int64_t at, const int64_t *from,
                  const int64_t *by, int64_t count, int64_t channel, int wide, int bf16) {
    Vector sum0 = {0}, sum1 = {0}, sum2 = {0}, sum3 = {0};
    for (int64_t i = 0; i < count; i++) {
#define ADD(I)                                                                                                         \
    if (I < wide)                                                                                                      \
        sum##I += load(gradient, from[i] + channel + I * WIDTH, bf16) * load(weight, by[i] + channel + I * WIDTH, 0);
        ADD(0) ADD(1) ADD(2) ADD(3)
#undef ADD
    }
#define STORE(I)                                                                                                       \
    if (I < wide) store(out, at + channel + I * WIDTH, bf16, sum##I);
    STORE(0) STORE(1) STORE(2) STORE(3)
#undef STORE
}

INLINE void row_of_input(const Call *call, const void *gradient, const float *weight, void *out, int64_t image,
                         int64_t row, const Reached *columns, int bf16) {
    int64_t channels = call->channels, from[POSITIONS], by[POSITIONS];
    Reached rows;
    reach(call, 0, row, call->out_rows, &rows);
    for (int64_t column = 0; column < call->columns; column++) {
        const Reached *of = columns + column;
        int64_t count = 0, channel = 0;
        for (int64_t i = 0; i < rows.count; i++) {
            int64_t start = (image * call->out_rows + rows.out[i]) * call->out_columns;
            for (int64_t j = 0; j < of->count; j++, count++) {
                from[count] = (start + of->out[j]) * channels;
                by[count] = (rows.position[i] * call->kernel[1] + of->position[j]) * channels;
            }
        }
        int64_t at = ((image * call->rows + row) * call->columns + column) * channels;
        for (; channel + 4 * WIDTH <= channels; channel += 4 * WIDTH)
            pixel(gradient, weight, out, at, from, by, count, channel, 4, bf16);
        for (; channel + 2 * WIDTH <= channels; channel += 2 * WIDTH)
            pixel(gradient, weight, out, at, from, by, count, channel, 2, bf16);
        for (; channel < channels; channel += WIDTH) /* the last vector may overlap */
            pixel(gradient, weight, out, at, from, by, count, least(channel, channels - WIDTH), 1, bf16);
    }
}

/* Writes the gradient of the input, given that of the output, and a weight in fp32: [position, channel]. Returns 0 if
   memory cannot be allocated. */
int input_gradient(const Call *call, const void *gradient, const float *weight, void *out, int threads) {
    Reached *columns = malloc((size_t)call->columns * sizeof *columns);
    if (!columns) return 0;
    for (int64_t column = 0; column < call->columns; column++)
        reach(call, 1, column, call->out_columns, columns + column);
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t at = 0; at < call->images * call->rows; at++)
        SPECIALIZED(bf16, call->bf16,
                    row_of_input(call, gradient, weight, out, at / call->rows, at % call->rows, columns, bf16));
    free(columns);
    return 1;
}

/* Adds the contributions of output rows to the sums of a kernel row, for one or two vectors of channels. Individual
   variables rather than arrays, which would stay in memory. */
INLINE void rows_of_output(const Call *call, const void *gradient, const void *x, double *sums, int64_t image,
                           int64_t begin, int64_t end, int64_t down, int64_t channel, int64_t skipped, int width,
                           int wide, int bf16) {
    int64_t channels = call->channels;
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#define NAME(K) Vector a##K = {0}, b##K = {0};
    EACH(NAME)
    for (int64_t row = begin; row < end; row++) {
        int64_t from = below(call, 0, row, down);
        if (from < 0 || from >= call->rows) continue;
        int64_t at = (image * call->out_rows + row) * call->out_columns * channels + channel;
        int64_t start = (image * call->rows + from) * call->columns * channels + channel;
        for (int64_t column = 0; column < call->out_columns; column++, at += channels) {
            Vector first = load(gradient, at, bf16), second = wide > 1 ? load(gradient, at + WIDTH, bf16) : first;
            int64_t left = below(call, 1, column, 0), right = left + (width - 1) * call->dilation[1];
            int is_inside = left >= 0 && right < call->columns;
#define ADD(K)                                                                                                         \
    if (K < width) {                                                                                                   \
        int64_t place = left + K * call->dilation[1];                                                                  \
        if (is_inside || (place >= 0 && place < call->columns)) {                                                      \
            a##K += first * load(x, start + place * channels, bf16);                                                   \
            if (wide > 1) b##K += second * load(x, start + place * channels + WIDTH, bf16);                            \
        }                                                                                                              \
    }
            EACH(ADD)
        }
    }
#define KEEP(K)                                                                                                        \
    if (K < width) {                                                                                                   \
        double *of = sums + (down * width + K) * channels + channel;                                                   \
        float numbers[2 * WIDTH];                                                                                      \
        store(numbers, 0, 0, a##K), store(numbers, WIDTH, 0, b##K);                                                    \
        for (int64_t i = skipped; i < wide * WIDTH; i++) of[i] += numbers[i];                                          \
    }
    EACH(KEEP)
#undef EACH
#undef NAME
#undef ADD
#undef KEEP
}

/* Adds the sums of a part of an image. */
INLINE void part_of_image(const Call *call, const void *gradient, const void *x, double *sums, int64_t image,
                          int64_t begin, int64_t end, int width, int bf16) {
    int64_t channels = call->channels, some = PIXELS / call->out_columns + 1;
    for (int64_t row = begin; row < end; row += some)
        for (int64_t down = 0; down < call->kernel[0]; down++) {
            int64_t channel = 0, last = least(row + some, end);
            for (; channel + 2 * WIDTH <= channels; channel += 2 * WIDTH)
                rows_of_output(call, gradient, x, sums, image, row, last, down, channel, 0, width, 2, bf16);
            for (; channel < channels; channel += WIDTH) {
                int64_t from = least(channel, channels - WIDTH);
                rows_of_output(call, gradient, x, sums, image, row, last, down, from, channel - from, width, 1, bf16);
            }
        }
}

/* Writes the gradient of the weight in fp32: [position, channel]. The kernel width must be 3, 5 or 7, with at least 16
   channels. Returns 0 if memory cannot be allocated. */
int weight_gradient(const Call *call, const void *gradient, const void *x, float *out, int threads) {
    int64_t parts = least(divided(PARTS, call->images), call->out_rows);
    int64_t count = call->kernel[0] * call->kernel[1] * call->channels;
    double *sums = calloc((size_t)(call->images * parts * count), sizeof *sums);
    if (!sums) return 0;
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t at = 0; at < call->images * parts; at++) {
        int64_t part = at % parts, begin = call->out_rows * part / parts, end = call->out_rows * (part + 1) / parts;
#define PART(WIDTH_OF_KERNEL)                                                                                          \
    SPECIALIZED(bf16, call->bf16, part_of_image(call, gradient, x, sums + at * count, at / parts, begin, end,          \
                                                WIDTH_OF_KERNEL, bf16))
        if (call->kernel[1] == 3)
            PART(3);
        else if (call->kernel[1] == 5)
            PART(5);
        else
            PART(7);
#undef PART
    }
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (int64_t i = 0; i < count; i++) {
        double sum = 0;
        for (int64_t at = 0; at < call->images * parts; at++) sum += sums[at * count + i];
        out[i] = (float)sum;
    }
    free(sums);
    return 1;
}
