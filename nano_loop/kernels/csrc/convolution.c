/* Convolutions of NHWC images by AMX, with fp32 values rounded to bf16 while they are packed, and fp32 sums.

   Each position of the kernel is a product: pixels × channels by channels × outputs. Some rows of some images are
   packed: 32 channels of all pixels one after another, so that a tile is 16 contiguous pixels. The window of each
   position is the same packed images at a different offset. Windows wrap around the ends of rows, and the results there
   are not written. With a stride, rows and columns are packed by their remainders (phases). Weights are packed once for
   all threads, which share the images. */
#include <stdint.h>
#include <string.h>

#include "avx512_bf16.h"

/* Strides are in elements. Channels of the inputs and outputs of the result are contiguous. */
typedef struct {
    int64_t images, channels, outputs, rows, columns;  /* of the inputs */
    int64_t out_rows, out_columns;
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    int64_t input[3], out[3];                          /* strides of image, row and column */
    int64_t weight[4];                                 /* of output, channel, kernel row and kernel column */
} Call;

#ifdef HAS_AVX512_BF16
#include "amx.h"
#include "packing.h"

int has_amx(void) { return find_amx(); }

#ifdef HAS_AMX
#define DEPTH 32            /* channels per step, two in each of 16 words */
#define BLOCK 32            /* pixels and outputs whose sums are computed at a time: four tiles */
#define OF_PIXEL 64         /* bytes of a packed pixel per step */
#define OF_STEP 2048        /* bytes of the packed weights per step: two tiles */
#define BYTES (384 << 10)   /* approximate size of the inputs packed at a time: a part of the L2 cache */

typedef struct {
    int64_t images_of_block, rows_of_block, blocks_of_rows, blocks;
    int64_t phases[2], phase_rows, phase_columns, packed; /* pixels in the rows of an image */
    int64_t steps, output_blocks, positions;
    int64_t inputs, weights;                              /* bytes: per thread, and for all threads */
} Plan;

static Plan plan_of(const Call *call, int64_t threads) {
    Plan plan;
    int64_t reach[2];
    plan.steps = divided(call->channels, DEPTH), plan.output_blocks = divided(call->outputs, BLOCK);
    plan.positions = call->kernel[0] * call->kernel[1];
    for (int axis = 0; axis < 2; axis++) {
        int64_t extent = (call->kernel[axis] - 1) * call->dilation[axis];
        plan.phases[axis] = least(call->stride[axis], extent + 1), reach[axis] = extent / call->stride[axis];
    }
    int64_t pixels = call->images * call->out_rows * call->out_columns;
    int64_t most_pixels = most(1, least(BYTES / (plan.steps * OF_PIXEL), divided(pixels, 2 * threads)));
    plan.rows_of_block = least(call->out_rows, most(1, most_pixels / call->out_columns));
    plan.blocks_of_rows = divided(call->out_rows, plan.rows_of_block);
    plan.rows_of_block = divided(call->out_rows, plan.blocks_of_rows);
    plan.images_of_block = least(call->images, most(1, most_pixels / (call->out_rows * call->out_columns)));
    plan.blocks = plan.blocks_of_rows * divided(call->images, plan.images_of_block);
    plan.phase_rows = plan.rows_of_block + reach[0], plan.phase_columns = call->out_columns + reach[1];
    plan.packed = plan.phases[0] * plan.phases[1] * plan.phase_rows * plan.phase_columns;
    plan.inputs = (plan.steps * plan.images_of_block * plan.packed + BLOCK) * OF_PIXEL; /* windows may exceed the end */
    plan.weights = plan.output_blocks * plan.positions * plan.steps * OF_STEP;
    return plan;
}

/* The number of bytes that a call needs, for all threads. */
int64_t convolution_bytes(const Call *call, int threads) {
    Plan plan = plan_of(call, threads);
    return plan.weights + threads * plan.inputs;
}

/* Packs some rows of some images: step, image, row phase, column phase, row, column, 32 channels. */
static void pack_inputs(const Call *call, const Plan *plan, const float *from, int64_t image, int64_t images, int64_t row,
                        char *to) {
    int64_t of_phase = plan->phase_rows * plan->phase_columns, of_step = plan->images_of_block * plan->packed * OF_PIXEL;
    for (int64_t i = 0; i < images; i++)
        for (int64_t line = 0; line < plan->phases[0] * plan->phase_rows; line++) {
            int64_t phase_of_row = line % plan->phases[0], y = row + line / plan->phases[0] * call->stride[0] + phase_of_row;
            int64_t of_line = phase_of_row * plan->phases[1] * of_phase + line / plan->phases[0] * plan->phase_columns;
            for (int64_t phase = 0; phase < plan->phases[1]; phase++)
                for (int64_t j = 0; j < plan->phase_columns; j++) {
                    int64_t x = phase + j * call->stride[1] - call->padding[1];
                    char *at = to + (i * plan->packed + of_line + phase * of_phase + j) * OF_PIXEL;
                    int is_there = y >= 0 && y < call->rows && x >= 0 && x < call->columns;
                    const float *pixel = from;
                    if (is_there) pixel += (image + i) * call->input[0] + y * call->input[1] + x * call->input[2];
                    for (int64_t step = 0; step < plan->steps; step++) {
                        __mmask32 here = is_there ? first_of_32(call->channels - step * DEPTH) : 0;
                        _mm512_store_si512(at + step * of_step, loaded(1, here, element(1, pixel, step * DEPTH)));
                    }
                }
        }
}

/* Packs the weights of 32 outputs: position, step, two tiles of 16 channel pairs × 16 outputs. */
static void pack_weights(const Call *call, const Plan *plan, const float *from, int64_t output, char *to) {
    const int64_t *strides = call->weight;
    int is_row = strides[1] == 1, is_column = strides[0] == 1;
    __m512i places = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                        _mm512_set1_epi32((int)strides[0]));
    for (int64_t half = 0; half < 2; half++) {
        int64_t first_output = output + 16 * half, outputs = call->outputs - first_output;
        for (int64_t step = 0; step < plan->steps; step++)
            for (int64_t position = 0; position < plan->positions; position++) {
                int64_t channels = call->channels - step * DEPTH;
                const float *at = from + position / call->kernel[1] * strides[2] + position % call->kernel[1] * strides[3];
                char *tile = to + (position * plan->steps + step) * OF_STEP + 1024 * half;
                if (outputs <= 0) memset(tile, 0, 1024);
                else if (is_row) pack_tile(1, 1, 1, at + first_output * strides[0] + step * DEPTH, strides[0], outputs, channels, tile);
                else if (is_column) pack_tile(1, 0, 1, at + first_output + step * DEPTH * strides[1], strides[1], outputs, channels, tile);
                else
                    for (int64_t pair = 0; pair < 16; pair++) {
                        __m512 numbers[2];
                        for (int64_t i = 0; i < 2; i++) {
                            int64_t channel = 2 * pair + i;
                            __mmask16 here = channel < channels ? first(outputs) : 0;
                            const float *base = at + first_output * strides[0] + (step * DEPTH + channel) * strides[1];
                            numbers[i] = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), here, places, here ? base : from, 4);
                        }
                        _mm512_store_si512(tile + 64 * pair, paired((__m256i)_mm512_cvtneps_pbh(numbers[0]),
                                                                    (__m256i)_mm512_cvtneps_pbh(numbers[1])));
                    }
            }
    }
}

/* The sums of 32 pixels and 32 outputs: two tiles side by side for the first 16 pixels, then for the others. */
WITH_TILES static void multiply(const Call *call, const Plan *plan, const char *inputs, const char *weights, float *sums) {
    int64_t of_step = plan->images_of_block * plan->packed * OF_PIXEL;
    begin_sums(1, sums, 16, 16 * BLOCK, BLOCK);
    for (int64_t row = 0; row < call->kernel[0]; row++)
        for (int64_t column = 0; column < call->kernel[1]; column++) {
            int64_t y = row * call->dilation[0], x = column * call->dilation[1];
            int64_t phase = y % call->stride[0] * plan->phases[1] + x % call->stride[1];
            const char *at = inputs + ((phase * plan->phase_rows + y / call->stride[0]) * plan->phase_columns + x / call->stride[1]) * OF_PIXEL;
            for (int64_t step = 0; step < plan->steps; step++, at += of_step, weights += OF_STEP)
                add_to_sums(1, at, at + 16 * OF_PIXEL, OF_PIXEL, weights, weights + 1024, 64);
        }
    store_sums(sums, 16, 16 * BLOCK, BLOCK);
}

/* Writes the sums of the pixels from `pixel` on, plus the bias, except where windows wrap around the end of a row. */
static void write_sums(const Call *call, const Plan *plan, const float *sums, const float *bias, int64_t pixel, int64_t rows,
                  int64_t output, float *to) {
    __mmask32 here = first_of_32(call->outputs - output);
    __mmask16 low_here = (__mmask16)here, high_here = (__mmask16)(here >> 16);
    __m512 low = _mm512_setzero_ps(), high = low;
    if (bias) low = _mm512_maskz_loadu_ps(low_here, bias + output), high = _mm512_maskz_loadu_ps(high_here, bias + output + 16);
    int64_t y = pixel / plan->phase_columns, x = pixel % plan->phase_columns;
    for (int64_t i = 0; i < BLOCK && y < rows; i++) {
        if (x < call->out_columns) {
            float *at = to + y * call->out[1] + x * call->out[2] + output;
            _mm512_mask_storeu_ps(at, low_here, _mm512_add_ps(_mm512_load_ps(sums + i * BLOCK), low));
            _mm512_mask_storeu_ps(at + 16, high_here, _mm512_add_ps(_mm512_load_ps(sums + i * BLOCK + 16), high));
        }
        if (++x == plan->phase_columns) x = 0, y++;
    }
}

static void compute_block(const Call *call, const Plan *plan, const float *inputs, const char *weights, const float *bias,
                          float *out, char *packed, int64_t block) {
    int64_t image = block / plan->blocks_of_rows * plan->images_of_block, images = least(plan->images_of_block, call->images - image);
    int64_t row = block % plan->blocks_of_rows * plan->rows_of_block, rows = least(plan->rows_of_block, call->out_rows - row);
    int64_t first_row = row * call->stride[0] - call->padding[0];
    if (rows <= 0) return;
    pack_inputs(call, plan, inputs, image, images, first_row, packed);
    float sums[BLOCK * BLOCK] __attribute__((aligned(64)));
    int64_t pixels = (rows - 1) * plan->phase_columns + call->out_columns;
    for (int64_t o = 0; o < plan->output_blocks; o++)
        for (int64_t i = 0; i < images; i++)
            for (int64_t pixel = 0; pixel < pixels; pixel += BLOCK) {
                multiply(call, plan, packed + (i * plan->packed + pixel) * OF_PIXEL, weights + o * plan->positions * plan->steps * OF_STEP, sums);
                int64_t place = (image + i) * call->out[0] + row * call->out[1];
                write_sums(call, plan, sums, bias, pixel, rows, o * BLOCK, out + place);
            }
}

/* Writes the convolution, plus the bias unless it is NULL. */
void convolution(const Call *call, const float *inputs, const float *weight, const float *bias, float *out, char *scratch,
                 int threads) {
    Plan plan = plan_of(call, threads);
    const uint8_t full[8] = {16, 16, 16, 16, 16, 16, 16, 16};
#pragma omp parallel num_threads(threads)
    {
        int64_t thread = omp_get_thread_num(), given = omp_get_num_threads();
        for (int64_t o = thread; o < plan.output_blocks; o += given)
            pack_weights(call, &plan, weight, o * BLOCK, scratch + o * plan.positions * plan.steps * OF_STEP);
#pragma omp barrier
        begin_tiles(full, full);
        for (int64_t block = plan.blocks * thread / given; block < plan.blocks * (thread + 1) / given; block++)
            compute_block(call, &plan, inputs, scratch, bias, out, scratch + plan.weights + thread * plan.inputs, block);
        end_tiles();
    }
}
#endif
#endif
