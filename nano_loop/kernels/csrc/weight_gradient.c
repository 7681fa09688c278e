/* The gradient of a convolution's weight, by the bf16 instructions of AVX-512 or by AMX, for NHWC images.

   Each position of the kernel is a product over the pixels of all images: outputs × pixels by pixels × channels. The
   instruction sums the products of two pairs of values, so two images are interleaved, pixel by pixel: the window of
   each position of the kernel is then the same packed images at a different offset, and nothing is unfolded. Sums are
   in fp32. Some rows of some images are packed at a time, so that they stay in the cache. With a stride, rows and
   columns are packed by their remainders (phases), so that the pixels of a window are contiguous.

   An AMX tile holds 16 pixels of a window, which wraps around the ends of rows: there, the gradient is zero-padded.

   Threads share the outputs, in which case each packs all images, or they share the images, in which case each has its
   own sums, which are added in thread order; or both. */
#include <stdint.h>
#include <string.h>

#include "avx512_bf16.h"

/* Strides are in elements. Channels of inputs and outputs of the gradient are contiguous; in the result, either
   channels or kernel positions are. */
typedef struct {
    int64_t images, channels, outputs, rows, columns;  /* of the inputs */
    int64_t out_rows, out_columns;                     /* of the gradient */
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    int64_t input[3], gradient[3];                     /* strides of image, row and column */
    int64_t result[4];                                 /* strides of output, channel, kernel row and kernel column */
    int64_t input_is_wide, gradient_is_wide, is_wide;  /* whether each is fp32; the last is the result */
    int64_t by_tiles;                                  /* whether to use AMX tiles */
} Call;

#ifdef HAS_AVX512_BF16
#include "amx.h"
#include "packing.h"

#define OUTPUTS 8   /* per tile of sums, each with one broadcast */
#define CHANNELS 32 /* per tile of sums: two vectors */
#define MOST_POSITIONS 25 /* maximum positions of a kernel with contiguous positions in the result */
#define PIXELS 144  /* per block, roughly: a tile reads 64 (AMX: 128) bytes of outputs and 128 of inputs per pixel */
#define AMX_OUTPUTS 32 /* with AMX: two tiles */
#define STEP 16        /* pixels per AMX tile */
#define OF_STEP 256    /* words per tile */

/* The partition of the work into blocks of pixels and among threads. */
typedef struct {
    int64_t pairs, pairs_of_block, rows_of_block, blocks_of_rows, blocks;
    int64_t phases[2], phase_rows, phase_columns; /* for the inputs of a block */
    int64_t packed;                           /* their pixels, per pair of images */
    int64_t outputs;                          /* per tile */
    int64_t channel_tiles, output_tiles, positions;
    int64_t output_parts, image_parts;        /* number of parts, divided among the threads */
    int64_t tiles_of_part;                    /* tiles of outputs */
    int64_t output_words;                     /* words per pixel of the packed gradient */
    int64_t inputs, gradients, sums;          /* bytes of each, per thread */
} Plan;

/* Estimated cycles per thread: for products, packing the inputs, and adding the sums of the threads. */
static double cycles(const Plan *plan, int64_t pixels, int64_t output_parts, int64_t image_parts) {
    double blocks = (double)divided(plan->blocks, image_parts), positions = (double)plan->positions;
    double tiles = (double)(divided(plan->output_tiles, output_parts) * plan->channel_tiles);
    double packed = (double)(plan->pairs_of_block * plan->packed * plan->channel_tiles);
    double summed = positions * (double)(plan->output_tiles * plan->channel_tiles) / (double)output_parts;
    double of_tile = plan->outputs == AMX_OUTPUTS ? 5.0 : 8.0;
    return blocks * (of_tile * positions * tiles * (double)pixels + 6.0 * packed) + 32.0 * (double)plan->outputs * summed;
}

static void divide(Plan *plan, int64_t pixels, int64_t threads) {
    double fewest = 0;
    for (int64_t outputs = 1; outputs <= least(threads, plan->output_tiles); outputs++) {
        int64_t images = least(threads / outputs, plan->blocks);
        double found = cycles(plan, pixels, outputs, images);
        if (outputs > 1 && found >= fewest) continue;
        fewest = found, plan->output_parts = outputs, plan->image_parts = images;
    }
    plan->tiles_of_part = divided(plan->output_tiles, plan->output_parts);
}

/* The number of AMX steps for the window of a pair of images with this number of rows. */
static int64_t steps_of(const Plan *plan, const Call *call, int64_t rows) {
    return divided((rows - 1) * plan->phase_columns + call->out_columns, STEP);
}

/* The extent of a kernel's windows, in steps of its stride. */
static int64_t reach(const Call *call, int axis) { return (call->kernel[axis] - 1) * call->dilation[axis] / call->stride[axis]; }

static Plan plan_of(const Call *call, int64_t threads) {
    Plan plan;
    int64_t pixels = call->out_rows * call->out_columns;
    plan.outputs = call->by_tiles ? AMX_OUTPUTS : OUTPUTS;
    plan.pairs = divided(call->images, 2);
    plan.rows_of_block = least(call->out_rows, most(1, PIXELS / call->out_columns));
    plan.blocks_of_rows = divided(call->out_rows, plan.rows_of_block);
    plan.rows_of_block = divided(call->out_rows, plan.blocks_of_rows);
    plan.blocks_of_rows = divided(call->out_rows, plan.rows_of_block);
    plan.pairs_of_block = least(plan.pairs, most(1, (PIXELS + pixels / 2) / pixels));
    plan.blocks = plan.blocks_of_rows * divided(plan.pairs, plan.pairs_of_block);
    for (int axis = 0; axis < 2; axis++)
        plan.phases[axis] = least(call->stride[axis], (call->kernel[axis] - 1) * call->dilation[axis] + 1);
    plan.phase_rows = plan.rows_of_block + reach(call, 0), plan.phase_columns = call->out_columns + reach(call, 1);
    plan.packed = plan.phases[0] * plan.phases[1] * plan.phase_rows * plan.phase_columns;
    plan.channel_tiles = divided(call->channels, CHANNELS);
    plan.output_tiles = divided(call->outputs, plan.outputs);
    plan.positions = call->kernel[0] * call->kernel[1];
    pixels = plan.pairs_of_block * plan.rows_of_block * call->out_columns;
    divide(&plan, pixels, threads);
    /* An odd number of cache lines: with a power of two, pixels would share few cache sets. */
    plan.output_words = divided(plan.tiles_of_part * OUTPUTS, 32) * 32 + 16;
    plan.inputs = 4 * plan.channel_tiles * plan.pairs_of_block * plan.packed * CHANNELS;
    plan.gradients = 4 * pixels * plan.output_words;
    if (call->by_tiles) {
        plan.inputs += 4 * (STEP - 1) * CHANNELS; /* the last tile may read past the last pixel */
        plan.gradients = 4 * plan.tiles_of_part * 2 * plan.pairs_of_block * steps_of(&plan, call, plan.rows_of_block) * OF_STEP;
    }
    plan.sums = 4 * plan.positions * plan.channel_tiles * plan.tiles_of_part * plan.outputs * CHANNELS;
    plan.inputs = up_to(plan.inputs, 64);
    return plan;
}

/* Whether `by_tiles` is supported. */
int has_amx(void) { return find_amx(); }

/* The number of bytes that a call needs, for all threads. */
int64_t weight_gradient_bytes(const Call *call, int threads) {
    Plan plan = plan_of(call, threads);
    return plan.output_parts * plan.image_parts * (plan.inputs + plan.gradients + plan.sums);
}

/* ------------------------------------------------------------------------------------------------- packing */

/* Packs input rows from `row` on for some pairs of images: channel tile, pair, row phase, column phase, row, column, 32
   words. */
INLINE void pack_inputs(const int wide, const Call *call, const Plan *plan, const void *from, int64_t pair, int64_t pairs,
                        int64_t row, uint32_t *to) {
    int64_t of_phase = plan->phase_rows * plan->phase_columns, of_tile = plan->pairs_of_block * plan->packed * CHANNELS;
    for (int64_t p = 0; p < pairs; p++)
        for (int64_t line = 0; line < plan->phases[0] * plan->phase_rows; line++) {
            int64_t phase_of_rows = line % plan->phases[0], i_row = line / plan->phases[0];
            int64_t y = row + i_row * call->stride[0] + phase_of_rows;
            int64_t of_line = phase_of_rows * plan->phases[1] * of_phase + i_row * plan->phase_columns;
            for (int64_t phase = 0; phase < plan->phases[1]; phase++)
                for (int64_t i = 0; i < plan->phase_columns; i++) {
                    int64_t x = phase + i * call->stride[1] - call->padding[1];
                    uint32_t *at = to + (p * plan->packed + of_line + phase * of_phase + i) * CHANNELS;
                    if (y < 0 || y >= call->rows || x < 0 || x >= call->columns) {
                        for (int64_t t = 0; t < plan->channel_tiles; t++) {
                            _mm512_storeu_si512(at + t * of_tile, _mm512_setzero_si512());
                            _mm512_storeu_si512(at + t * of_tile + 16, _mm512_setzero_si512());
                        }
                        continue;
                    }
                    const void *low = element(wide, from, 2 * (pair + p) * call->input[0] + y * call->input[1] + x * call->input[2]);
                    const void *high = 2 * (pair + p) + 1 < call->images ? element(wide, low, call->input[0]) : 0;
                    for (int64_t t = 0; t < plan->channel_tiles; t++) {
                        int64_t c = t * CHANNELS;
                        interleave_of(wide, element(wide, low, c), high ? element(wide, high, c) : 0,
                                      first_of_32(call->channels - c), at + t * of_tile);
                    }
                }
        }
}

/* Packs rows of the gradient for some outputs: pair, row, column, words. */
INLINE void pack_gradients(const int wide, const Call *call, const Plan *plan, const void *from, int64_t pair,
                           int64_t pairs, int64_t row, int64_t rows, int64_t output, uint32_t *to) {
    int64_t outputs = least(plan->tiles_of_part * OUTPUTS, call->outputs - output);
    for (int64_t p = pair; p < pair + pairs; p++)
        for (int64_t y = row; y < row + rows; y++)
            for (int64_t x = 0; x < call->out_columns; x++, to += plan->output_words) {
                int64_t place = 2 * p * call->gradient[0] + y * call->gradient[1] + x * call->gradient[2] + output;
                const void *low = element(wide, from, place);
                const void *high = 2 * p + 1 < call->images ? element(wide, low, call->gradient[0]) : 0;
                for (int64_t o = 0; o < outputs; o += 32)
                    interleave_of(wide, element(wide, low, o), high ? element(wide, high, o) : 0, first_of_32(outputs - o), to + o);
            }
}

/* The same for AMX: 16 outputs, pair, step, output, 16 words, with zeros where windows wrap around row ends. */
INLINE void pack_for_tiles(const int wide, const Call *call, const Plan *plan, const void *from, int64_t pair,
                           int64_t pairs, int64_t row, int64_t rows, int64_t output, uint32_t *to) {
    int64_t steps = steps_of(plan, call, rows), end = least(call->outputs, output + plan->tiles_of_part * AMX_OUTPUTS);
    for (int64_t p = pair; p < pair + pairs; p++) {
        int64_t x = 0, y = row;
        for (int64_t step = 0; step < steps; step++) {
            const void *low[STEP], *high[STEP];
            for (int i = 0; i < STEP; i++) {
                int64_t place = 2 * p * call->gradient[0] + y * call->gradient[1] + x * call->gradient[2] + output;
                low[i] = x < call->out_columns && y < row + rows ? element(wide, from, place) : 0;
                high[i] = low[i] && 2 * p + 1 < call->images ? element(wide, low[i], call->gradient[0]) : 0;
                if (++x == plan->phase_columns) x = 0, y++;
            }
            uint32_t *at = to + ((p - pair) * steps + step) * OF_STEP;
            for (int64_t o = 0; output + o < end; o += 16, at += pairs * steps * OF_STEP) {
                __mmask16 here = first(end - output - o);
                __m512i words[STEP];
#pragma GCC unroll 16
                for (int i = 0; i < STEP; i++) {
                    words[i] = _mm512_setzero_si512();
                    if (low[i])
                        words[i] = paired(sixteen(wide, here, element(wide, low[i], o)),
                                          high[i] ? sixteen(wide, here, element(wide, high[i], o)) : _mm256_setzero_si256());
                }
                transpose((Vector *)words);
#pragma GCC unroll 16
                for (int i = 0; i < STEP; i++) _mm512_store_si512(at + 16 * i, words[i]);
            }
        }
    }
    /* The second half of the last tile of 32. */
    if (divided(end - output, 16) % 2)
        memset(to + divided(end - output, 16) * pairs * steps * OF_STEP, 0, (size_t)(4 * pairs * steps * OF_STEP));
}

/* ------------------------------------------------------------------------------------------------ products */

/* A window of the packed inputs: its number of pixels, and their stride in words. */
typedef struct {
    int64_t pairs, rows, columns, of_pair, of_row;
} Window;

/* Prefetching during the products of a block: the rows of the next one. */
typedef struct {
    const char *tensors[2];            /* at the first row of the block: inputs and gradient */
    int64_t bytes[2], of_image[2];     /* of an image's rows, and the stride between images */
    int64_t tensor, image, images;
    const char *at, *end;              /* of the image that is being prefetched */
    int64_t step;                      /* bytes for each pixel of a tile */
} Ahead;

static void begin_image(Ahead *ahead) {
    ahead->at = ahead->tensors[ahead->tensor] + ahead->image * ahead->of_image[ahead->tensor];
    ahead->end = ahead->at + ahead->bytes[ahead->tensor];
}

static Ahead ahead_of(const Call *call, const Plan *plan, const void *inputs, const void *gradient, int64_t block,
                      int64_t steps) {
    Ahead ahead;
    int64_t pair = block / plan->blocks_of_rows * plan->pairs_of_block;
    int64_t row = block % plan->blocks_of_rows * plan->rows_of_block, rows = least(plan->rows_of_block, call->out_rows - row);
    int64_t in_row = row * call->stride[0] - call->padding[0];
    int64_t from = most(0, in_row), until = least(call->rows, in_row + plan->phase_rows * call->stride[0]);
    int64_t of_input = call->input_is_wide ? 4 : 2, of_gradient = call->gradient_is_wide ? 4 : 2;
    ahead.tensor = ahead.image = 0;
    ahead.images = least(2 * plan->pairs_of_block, call->images - 2 * pair);
    ahead.tensors[0] = (const char *)inputs + of_input * (2 * pair * call->input[0] + from * call->input[1]);
    ahead.tensors[1] = (const char *)gradient + of_gradient * (2 * pair * call->gradient[0] + row * call->gradient[1]);
    ahead.bytes[0] = of_input * most(0, until - from) * call->input[1], ahead.bytes[1] = of_gradient * rows * call->gradient[1];
    ahead.of_image[0] = of_input * call->input[0], ahead.of_image[1] = of_gradient * call->gradient[0];
    ahead.step = divided(ahead.images * (ahead.bytes[0] + ahead.bytes[1]), steps);
    begin_image(&ahead);
    return ahead;
}

/* The address to prefetch next, at the start of a row of a tile. */
INLINE const char *fetched(Ahead *ahead) {
    if (ahead->at >= ahead->end && ahead->step) {
        if (++ahead->image == ahead->images) {
            ahead->image = 0;
            if (++ahead->tensor == 2) ahead->tensor = ahead->step = 0;
        }
        begin_image(ahead);
    }
    return ahead->at;
}

/* Adds the products of some outputs and channels to a tile of sums, or initializes it. */
INLINE void add_products(const int outputs, const Window *window, const uint32_t *gradients, int64_t words,
                         const uint32_t *inputs, float *to, int begins, Ahead *ahead) {
    __m512 sums[OUTPUTS][2];
#pragma GCC unroll 8
    for (int i = 0; i < outputs; i++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++)
            sums[i][j] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(to + i * CHANNELS + 16 * j);
    for (int64_t pair = 0; pair < window->pairs; pair++)
        for (int64_t row = 0; row < window->rows; row++) {
            const uint32_t *at = inputs + pair * window->of_pair + row * window->of_row;
            const char *next = fetched(ahead);
            for (int64_t column = 0; column < window->columns; column++) {
                _mm_prefetch(next, _MM_HINT_T0);
                next += ahead->step;
                __m512bh low = (__m512bh)_mm512_loadu_si512(at), high = (__m512bh)_mm512_loadu_si512(at + 16);
#pragma GCC unroll 8
                for (int i = 0; i < outputs; i++) {
                    __m512bh of_output = (__m512bh)_mm512_set1_epi32((int)gradients[i]);
                    sums[i][0] = _mm512_dpbf16_ps(sums[i][0], of_output, low);
                    sums[i][1] = _mm512_dpbf16_ps(sums[i][1], of_output, high);
                }
                at += CHANNELS, gradients += words;
            }
            ahead->at = next;
        }
#pragma GCC unroll 8
    for (int i = 0; i < outputs; i++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) _mm512_storeu_ps(to + i * CHANNELS + 16 * j, sums[i][j]);
}

#ifdef HAS_AMX
/* The same for 32 outputs, whose gradients are in two groups, and all pixels of some pairs, in steps of a tile. */
WITH_TILES static void add_by_tiles(int64_t pairs, int64_t steps, const uint32_t *gradients, const uint32_t *inputs,
                                    int64_t of_pair, float *sums, int begins) {
    const uint32_t *second = gradients + pairs * steps * OF_STEP;
    begin_sums(begins, sums, 16, 16 * CHANNELS, CHANNELS);
    for (int64_t pair = 0; pair < pairs; pair++, inputs += of_pair) {
        const uint32_t *at = inputs;
        for (int64_t step = 0; step < steps; step++, at += STEP * CHANNELS, gradients += OF_STEP, second += OF_STEP)
            add_to_sums(0, gradients, second, 64, at, at + 16, 4 * CHANNELS);
    }
    store_sums(sums, 16, 16 * CHANNELS, CHANNELS);
}
#endif

/* The memory of a part. */
typedef struct {
    uint32_t *inputs, *gradients;
    float *sums; /* kernel position, channel tile, output tile, output, channel */
} Memory;

static Memory memory_of(const Plan *plan, char *scratch, int64_t number) {
    char *at = scratch + number * (plan->inputs + plan->gradients + plan->sums);
    Memory found = {(uint32_t *)at, (uint32_t *)(at + plan->inputs), (float *)(at + plan->inputs + plan->gradients)};
    return found;
}

/* Adds a block of pixels to the sums of a thread. */
static void add_block(const Call *call, const Plan *plan, const void *inputs, const void *gradient, const Memory *memory,
                      int64_t block, int64_t output, int begins, int ends) {
    int64_t pair = block / plan->blocks_of_rows * plan->pairs_of_block;
    int64_t row = block % plan->blocks_of_rows * plan->rows_of_block;
    int64_t pairs = least(plan->pairs_of_block, plan->pairs - pair);
    int64_t rows = least(plan->rows_of_block, call->out_rows - row);
    int64_t tiles = least(plan->tiles_of_part, divided(call->outputs - output, plan->outputs));
    int64_t in_row = row * call->stride[0] - call->padding[0];
    SPECIALIZED(wide, call->input_is_wide,
                pack_inputs(wide, call, plan, inputs, pair, pairs, in_row, memory->inputs));
    SPECIALIZED(wide, call->gradient_is_wide, {
        if (call->by_tiles) pack_for_tiles(wide, call, plan, gradient, pair, pairs, row, rows, output, memory->gradients);
        else pack_gradients(wide, call, plan, gradient, pair, pairs, row, rows, output, memory->gradients);
    });
    int64_t of_pair = plan->packed * CHANNELS, of_tile = plan->outputs * CHANNELS;
    Window window = {pairs, rows, call->out_columns, of_pair, plan->phase_columns * CHANNELS};
    int64_t steps = plan->positions * plan->channel_tiles * tiles * pairs * rows * call->out_columns;
    Ahead ahead = ahead_of(call, plan, inputs, gradient, ends ? block : block + 1, steps);
    if (ends) ahead.step = 0;
    for (int64_t c = 0; c < plan->channel_tiles; c++)
        for (int64_t o = 0; o < tiles; o++)
            for (int64_t position = 0; position < plan->positions; position++) {
                int64_t y = position / call->kernel[1] * call->dilation[0], x = position % call->kernel[1] * call->dilation[1];
                int64_t phase = y % call->stride[0] * plan->phases[1] + x % call->stride[1];
                int64_t pixel = (phase * plan->phase_rows + y / call->stride[0]) * plan->phase_columns + x / call->stride[1];
                const uint32_t *from = memory->inputs + c * plan->pairs_of_block * of_pair + pixel * CHANNELS;
                float *sums = memory->sums + ((position * plan->channel_tiles + c) * plan->tiles_of_part + o) * of_tile;
#ifdef HAS_AMX
                if (call->by_tiles) {
                    int64_t of_window = steps_of(plan, call, rows);
                    add_by_tiles(pairs, of_window, memory->gradients + 2 * o * pairs * of_window * OF_STEP, from, of_pair, sums, begins);
                    continue;
                }
#endif
                add_products(OUTPUTS, &window, memory->gradients + o * OUTPUTS, plan->output_words, from, sums, begins, &ahead);
            }
}

/* ------------------------------------------------------------------------------------------------- results */

/* The sums for 32 channels, added over all parts that share some outputs. */
INLINE void sum(const Plan *plan, char *scratch, int64_t first_part, int64_t at, __m512 *low, __m512 *high) {
    *low = *high = _mm512_setzero_ps();
    for (int64_t part = 0; part < plan->image_parts; part++) {
        const float *sums = memory_of(plan, scratch, first_part + part).sums + at;
        *low = _mm512_add_ps(*low, _mm512_loadu_ps(sums)), *high = _mm512_add_ps(*high, _mm512_loadu_ps(sums + 16));
    }
}

/* Writes the sums of one kernel position and one channel tile, with contiguous channels. */
static void store(const Call *call, const Plan *plan, char *scratch, int64_t first_part, int64_t output,
                  int64_t place, char *to) {
    int64_t position = place / plan->channel_tiles, channel = place % plan->channel_tiles * CHANNELS;
    int64_t y = position / call->kernel[1], x = position % call->kernel[1];
    int64_t of_part = plan->tiles_of_part * plan->outputs, outputs = least(of_part, call->outputs - output);
    __mmask32 here = first_of_32(call->channels - channel);
    for (int64_t o = 0; o < outputs; o++) {
        int64_t at = (output + o) * call->result[0] + y * call->result[2] + x * call->result[3] + channel;
        __m512 low, high;
        sum(plan, scratch, first_part, (place * of_part + o) * CHANNELS, &low, &high);
        if (call->is_wide) {
            _mm512_mask_storeu_ps(to + 4 * at, (__mmask16)here, low);
            _mm512_mask_storeu_ps(to + 4 * at + 64, (__mmask16)(here >> 16), high);
        } else {
            _mm512_mask_storeu_epi16(to + 2 * at, here, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* The permutation from vectors of 32 channels for each position to the same number of vectors in which the positions of
   a channel are contiguous: the channel for each element, and its source vector. */
typedef struct {
    __m512i channel[MOST_POSITIONS];
    __mmask32 from[MOST_POSITIONS][MOST_POSITIONS];
} Turn;

static void turn_of(int64_t positions, Turn *turn) {
    memset(turn, 0, sizeof *turn);
    for (int64_t vector = 0; vector < positions; vector++) {
        uint16_t channels[CHANNELS];
        for (int64_t i = 0; i < CHANNELS; i++) {
            int64_t place = vector * CHANNELS + i;
            channels[i] = (uint16_t)(place / positions);
            turn->from[vector][place % positions] |= (__mmask32)1 << i;
        }
        memcpy(&turn->channel[vector], channels, sizeof channels);
    }
}

/* Writes the sums of one channel tile in bf16, with contiguous positions. */
static void store_turned(const Call *call, const Plan *plan, const Turn *turn, char *scratch, int64_t first_part,
                         int64_t output, int64_t tile, char *to) {
    int64_t of_part = plan->tiles_of_part * plan->outputs, outputs = least(of_part, call->outputs - output);
    int64_t positions = plan->positions;
    int64_t elements = least(CHANNELS, call->channels - tile * CHANNELS) * positions;
    for (int64_t o = 0; o < outputs; o++) {
        __m512i found[MOST_POSITIONS];
        for (int64_t position = 0; position < positions; position++) {
            int64_t place = position * plan->channel_tiles + tile;
            __m512 low, high;
            sum(plan, scratch, first_part, (place * of_part + o) * CHANNELS, &low, &high);
            found[position] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
        char *out = to + 2 * ((output + o) * call->result[0] + tile * CHANNELS * positions);
        for (int64_t vector = 0; vector < positions; vector++) {
            __m512i turned = _mm512_setzero_si512();
            for (int64_t position = 0; position < positions; position++)
                turned = _mm512_mask_permutexvar_epi16(turned, turn->from[vector][position], turn->channel[vector],
                                                       found[position]);
            _mm512_mask_storeu_epi16(out + 2 * vector * CHANNELS, first_of_32(elements - vector * CHANNELS), turned);
        }
    }
}

/* Adds the blocks of one of the parts of the work. */
static void add_part(const Call *call, const Plan *plan, const void *inputs, const void *gradient, char *scratch,
                     int64_t part) {
    int64_t of_images = part % plan->image_parts, output = part / plan->image_parts * plan->tiles_of_part * plan->outputs;
    if (output >= call->outputs) return;
    Memory memory = memory_of(plan, scratch, part);
#ifdef HAS_AMX
    const uint8_t full[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    if (call->by_tiles) {
        memset(memory.inputs, 0, (size_t)plan->inputs); /* values past a pair's pixels are multiplied by zeros */
        begin_tiles(full, full);
    }
#endif
    int64_t begin = of_images * plan->blocks / plan->image_parts, end = (of_images + 1) * plan->blocks / plan->image_parts;
    for (int64_t block = begin; block < end; block++)
        add_block(call, plan, inputs, gradient, &memory, block, output, block == begin, block + 1 == end);
#ifdef HAS_AMX
    if (call->by_tiles) end_tiles();
#endif
}

/* Writes the sums of the parts with the same outputs: each writes some positions and channels. */
static void store_part(const Call *call, const Plan *plan, const Turn *turn, char *scratch, int64_t part,
                       char *result) {
    int64_t of_images = part % plan->image_parts, output = part / plan->image_parts * plan->tiles_of_part * plan->outputs;
    if (output >= call->outputs) return;
    if (turn) {
        for (int64_t tile = of_images; tile < plan->channel_tiles; tile += plan->image_parts)
            store_turned(call, plan, turn, scratch, part - of_images, output, tile, result);
        return;
    }
    for (int64_t place = of_images; place < plan->positions * plan->channel_tiles; place += plan->image_parts)
        store(call, plan, scratch, part - of_images, output, place, result);
}

/* Writes the gradient of the weight. In bf16, if channels are not contiguous, the at most MOST_POSITIONS positions are.
   OpenMP may provide fewer threads than requested: each then computes several parts. */
void weight_gradient(const Call *call, const void *inputs, const void *gradient, char *result, char *scratch, int threads) {
    Plan plan = plan_of(call, threads);
    int64_t parts = plan.output_parts * plan.image_parts;
    int turns = call->result[1] != 1;
    Turn turn;
    if (turns) turn_of(plan.positions, &turn);
#pragma omp parallel num_threads((int)parts)
    {
        int64_t thread = omp_get_thread_num(), given = omp_get_num_threads();
        for (int64_t part = thread; part < parts; part += given)
            add_part(call, &plan, inputs, gradient, scratch, part);
#pragma omp barrier
        for (int64_t part = thread; part < parts; part += given) store_part(call, &plan, turns ? &turn : 0, scratch, part, result);
    }
}
#endif
