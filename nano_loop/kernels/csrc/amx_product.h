/* Matrix products by AMX tiles, with the precision of product.c: bf16 factors, fp32 sums.

   Both factors are packed, in blocks of 32 rows of A and 32 columns of B. Each step of depth 32 has two tiles of 16
   lines of 16 words; a word holds two values that are summed together. A line is a row of A, or a pair of depth indices
   of B. Some rows of A are packed for all threads, then some columns of B, whose products the threads share by blocks.
   Blocks are zero-padded. Each element is computed by one thread, in an order independent of the number of threads. */
#pragma once
#include "amx.h"
#include "packing.h"

#ifdef HAS_AMX
#define BLOCK 32            /* rows or columns of a block, and the depth of a step */
#define OF_STEP 2048        /* bytes of a step of a block: two tiles */
#define SUMS 1024           /* for a pair of blocks */
#define DEPTH 4096          /* maximum depth that is packed at a time */
#define STEPS 16            /* for a block of A that stays in the L1 cache: 32 kB */
#define BYTES_OF_A (4 << 20)
#define BYTES_OF_B (1 << 20) /* half of the L2 cache of CPUs with AMX */

typedef struct {
    int64_t blocks, steps;             /* of the depth, and steps per block */
    int64_t rows, columns;             /* number of blocks of 32 */
    int64_t rows_at_once, columns_at_once;
    int64_t of_a, of_b, of_sums;       /* bytes: packed factors, and the sums of all threads or of one */
} Tiling;

static Tiling tiling_of(const Call *call) {
    Tiling tiling;
    tiling.blocks = divided(call->depth, DEPTH);
    tiling.steps = divided(divided(call->depth, BLOCK), tiling.blocks);
    tiling.rows = divided(call->rows, BLOCK), tiling.columns = divided(call->columns, BLOCK);
    tiling.rows_at_once = least(tiling.rows, BYTES_OF_A / (tiling.steps * OF_STEP));
    tiling.columns_at_once = least(tiling.columns, BYTES_OF_B / (tiling.steps * OF_STEP));
    tiling.of_a = tiling.rows_at_once * tiling.steps * OF_STEP;
    tiling.of_b = tiling.columns_at_once * tiling.steps * OF_STEP;
    tiling.of_sums = (tiling.blocks > 1 ? tiling.rows * tiling.columns : tiling.columns_at_once) * SUMS * 4;
    return tiling;
}

static int64_t bytes_of_tiling(const Tiling *tiling, int64_t threads) {
    return tiling->of_a + tiling->of_b + tiling->of_sums * (tiling->blocks > 1 ? 1 : threads);
}

/* ------------------------------------------------------------------------------------------------- packing */

/* Packs a block of `count` rows or columns for some steps, with strides along the depth and between rows or columns. */
INLINE void pack_block_of(const int wide, const int is_contiguous, const int by_pairs, const void *from, int64_t of_depth,
                          int64_t of_line, int64_t count, int64_t depth, int64_t steps, char *to) {
    for (int64_t step = 0; step < steps; step++)
        for (int64_t half = 0; half < 2; half++)
            pack_tile(wide, is_contiguous, by_pairs, element(wide, from, step * BLOCK * of_depth + 16 * half * of_line),
                      is_contiguous ? of_line : of_depth, count - 16 * half, depth - step * BLOCK,
                      to + step * OF_STEP + 1024 * half);
}

INLINE void pack_block(const int by_pairs, int64_t is_wide, const void *from, int64_t of_depth, int64_t of_line, int64_t count,
                       int64_t depth, int64_t steps, char *to) {
    SPECIALIZED(wide, is_wide, SPECIALIZED(is_contiguous, of_depth == 1,
        pack_block_of(wide, is_contiguous, by_pairs, from, of_depth, of_line, count, depth, steps, to)));
}

static void pack_rows_of_a(const Call *call, const void *a, int64_t row, int64_t from, int64_t steps, char *to) {
    const void *place = element(call->a_is_wide != 0, a, row * call->a[0] + from * call->a[1]);
    pack_block(0, call->a_is_wide, place, call->a[1], call->a[0], call->rows - row, call->depth - from, steps, to);
}

static void pack_columns_of_b(const Call *call, const void *b, int64_t column, int64_t from, int64_t steps, char *to) {
    const void *place = element(call->b_is_wide != 0, b, column * call->b[1] + from * call->b[0]);
    pack_block(1, call->b_is_wide, place, call->b[0], call->b[1], call->columns - column, call->depth - from, steps, to);
}

/* ------------------------------------------------------------------------------------------------ products */

/* The sums of a pair of blocks, four tiles of 16 × 16: initialized or increased by some steps. See amx.h about the
   empty instructions. */
WITH_TILES static void add_steps(int64_t steps, const char *a, const char *b, float *sums, int begins) {
    begin_sums(begins, sums, 256, 512, 16);
    for (int64_t step = 0; step < steps; step++, a += OF_STEP, b += OF_STEP) add_to_sums(a, a + 1024, 64, b, b + 1024, 64);
    store_sums(sums, 256, 512, 16);
}

/* Writes the sums of a pair of blocks, plus the bias row. */
static void write_block(const Call *call, const float *sums, const void *bias, char *out, int64_t row, int64_t column) {
    for (int64_t half = 0; half < 2; half++) {
        int64_t at = column + 16 * half;
        __mmask16 here = first(call->columns - at);
        __m512 added = _mm512_setzero_ps();
        if (bias && call->bias_is_wide) {
            added = _mm512_maskz_loadu_ps(here, element(1, bias, at));
        } else if (bias) {
            __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, element(0, bias, at)));
            added = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
        }
        for (int64_t i = 0; i < least(BLOCK, call->rows - row); i++) {
            __m512 found = _mm512_add_ps(_mm512_load_ps(sums + 512 * (i / 16) + 256 * half + 16 * (i % 16)), added);
            char *to = out + (call->is_wide ? 4 : 2) * ((row + i) * call->out_row + at);
            if (call->is_wide) _mm512_mask_storeu_ps(to, here, found);
            else _mm256_mask_storeu_epi16(to, here, (__m256i)_mm512_cvtneps_pbh(found));
        }
    }
}

/* One thread's share of a product. If `threads` > 1, all of them must compute together. */
static void multiply_by_tiles(const Call *call, const void *a, const void *b, const void *bias, char *out, char *scratch,
                              int64_t thread, int64_t threads) {
    Tiling tiling = tiling_of(call);
    char *packed_a = scratch, *packed_b = scratch + tiling.of_a;
    float *all = (float *)(packed_b + tiling.of_b), *own = (float *)((char *)all + thread * tiling.of_sums);
    const uint8_t full[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    begin_tiles(full, full);
    for (int64_t block = 0; block < tiling.blocks; block++) {
        int64_t from = block * tiling.steps * BLOCK, steps = least(tiling.steps, divided(call->depth - from, BLOCK));
        for (int64_t row = 0; row < tiling.rows; row += tiling.rows_at_once) {
            int64_t rows = least(tiling.rows_at_once, tiling.rows - row);
            for (int64_t i = thread; i < rows; i += threads)
                pack_rows_of_a(call, a, (row + i) * BLOCK, from, steps, packed_a + i * steps * OF_STEP);
            for (int64_t column = 0; column < tiling.columns; column += tiling.columns_at_once) {
                int64_t columns = least(tiling.columns_at_once, tiling.columns - column);
                for (int64_t j = thread; j < columns; j += threads)
                    pack_columns_of_b(call, b, (column + j) * BLOCK, from, steps, packed_b + j * steps * OF_STEP);
                if (threads > 1) {
#pragma omp barrier
                }
                /* With few rows, threads also share the columns. */
                int64_t parts = rows >= 2 * threads ? 1 : least(columns, divided(2 * threads, rows)), units = rows * parts;
                for (int64_t unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
                    int64_t i = unit / parts, begin = columns * (unit % parts) / parts;
                    int64_t end = columns * (unit % parts + 1) / parts;
                    for (int64_t step = 0; step < steps; step += STEPS)
                        for (int64_t j = begin; j < end; j++) {
                            float *sums = tiling.blocks > 1 ? all + ((row + i) * tiling.columns + column + j) * SUMS : own + j * SUMS;
                            add_steps(least(STEPS, steps - step), packed_a + (i * steps + step) * OF_STEP,
                                      packed_b + (j * steps + step) * OF_STEP, sums, block == 0 && step == 0);
                            if (block + 1 == tiling.blocks && step + STEPS >= steps)
                                write_block(call, sums, bias, out, (row + i) * BLOCK, (column + j) * BLOCK);
                        }
                }
                if (threads > 1) {
#pragma omp barrier
                }
            }
        }
    }
    end_tiles();
}
#else
typedef int64_t Tiling;
static Tiling tiling_of(const Call *call) { return call->depth; }
static int64_t bytes_of_tiling(const Tiling *tiling, int64_t threads) { return *tiling * threads; }
static void multiply_by_tiles(const Call *call, const void *a, const void *b, const void *bias, char *out, char *scratch,
                              int64_t thread, int64_t threads) {
    (void)call, (void)a, (void)b, (void)bias, (void)out, (void)scratch, (void)thread, (void)threads;
}
#endif
