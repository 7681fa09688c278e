/* Matrix products by AMX tiles, with the precision of product.c: bf16 factors, fp32 sums.

   Each thread computes a rectangle of the result, and packs what it needs of both factors. It does so for groups of
   columns, whose packed part of B stays in the L2 cache, while blocks of 32 rows of A pass: a few steps of one of them
   stay in the L1 cache, while the columns of the group stream by. If the depth is large, groups are squares, and the
   sums of a group wait in the L2 cache for the next part of the depth.

   A step is a depth of 32, and takes two tiles of each factor with 16 lines of 16 words; a word holds two values that
   are summed together. A line is a row of A, or a pair of depth indices of B. Blocks are zero-padded. Each element is
   computed by one thread, in an order independent of the number of threads. */
#pragma once
#include "amx.h"
#include "packing.h"

#ifdef HAS_AMX
#define BLOCK 32             /* rows or columns of a block, and the depth of a step */
#define OF_STEP 2048         /* bytes of a step of a block: two tiles */
#define SUMS 1024            /* for a pair of blocks */
#define STEPS 16             /* of a block of A that stays in the L1 cache: 32 kB */
#define BYTES_OF_B (1 << 20) /* half of the L2 cache of CPUs with AMX */
#define SQUARE 16            /* blocks of rows and columns of a group, and its steps, if the depth is divided */

typedef struct {
    int64_t row_parts, column_parts; /* of the result, one per thread */
    int64_t rows, columns, steps;    /* of a group, in blocks */
    int64_t rows_at_once;            /* blocks of A that are packed at a time */
    int64_t is_divided;              /* whether a group has a part of the depth */
    int64_t of_a, of_b, own;         /* bytes: of packed blocks, and of all that a thread needs */
} Tiling;

/* Chooses parts and groups for the fewest cycles of a thread: packing a step of a block takes as long as about three
   pairs of blocks are multiplied for a step, and five if A is transposed. */
static Tiling tiling_of(const Call *call, int64_t threads) {
    Tiling best = {0};
    int64_t rows = divided(call->rows, BLOCK), columns = divided(call->columns, BLOCK), steps = divided(call->depth, BLOCK);
    int64_t fewest = INT64_MAX, is_transposed = call->a[1] != 1;
    for (int64_t parts = 1; parts <= least(threads, columns); parts++)
        for (int is_square = 0; is_square < 2; is_square++) {
            Tiling tiling = {.row_parts = least(threads / parts, rows), .column_parts = parts};
            int64_t own_rows = divided(rows, tiling.row_parts), own_columns = divided(columns, parts);
            int64_t widest = is_square ? SQUARE : BYTES_OF_B / (steps * OF_STEP);
            if (!widest) continue;
            tiling.steps = is_square ? divided(steps, divided(steps, SQUARE)) : steps;
            tiling.rows = is_square ? divided(own_rows, divided(own_rows, SQUARE)) : own_rows;
            tiling.columns = divided(own_columns, divided(own_columns, widest));
            int64_t cost = own_rows * own_columns + 3 * own_columns * divided(own_rows, tiling.rows) +
                           (is_transposed ? 5 : 3) * own_rows * divided(own_columns, tiling.columns);
            if (cost < fewest) fewest = cost, best = tiling;
        }
    best.is_divided = best.steps < steps;
    best.rows_at_once = least(is_transposed ? 2 : 1, best.rows); /* two fill pairs of cache lines, which are read together */
    best.of_a = best.rows_at_once * best.steps * OF_STEP;
    best.of_b = best.columns * best.steps * OF_STEP;
    best.own = best.of_a + best.of_b + (best.is_divided ? best.rows : 1) * best.columns * SUMS * 4;
    return best;
}

static int64_t bytes_of_tiling(const Tiling *tiling) { return tiling->row_parts * tiling->column_parts * tiling->own; }

/* ------------------------------------------------------------------------------------------------- packing */

/* A factor: its values, whether they are fp32, and its strides and sizes, along the depth and of its rows or columns. */
typedef struct {
    const void *values;
    int64_t is_wide, of_depth, of_line, depth, lines;
    int by_pairs; /* whether a line of a packed tile is a pair of depth indices */
} Factor;

/* Packs some blocks for some steps, each in the order of memory. */
INLINE void pack_blocks_of(const int wide, const int is_contiguous, const int by_pairs, const Factor *factor, int64_t block,
                           int64_t blocks, int64_t step, int64_t steps, char *to) {
    for (int64_t unit = 0; unit < blocks * steps; unit++) {
        int64_t i = is_contiguous ? unit / steps : unit % blocks, k = is_contiguous ? unit % steps : unit / blocks;
        for (int64_t half = 0; half < 2; half++) {
            int64_t line = (block + i) * BLOCK + 16 * half, at = (step + k) * BLOCK;
            pack_tile(wide, is_contiguous, by_pairs, element(wide, factor->values, line * factor->of_line + at * factor->of_depth),
                      is_contiguous ? factor->of_line : factor->of_depth, factor->lines - line, factor->depth - at,
                      to + (i * steps + k) * OF_STEP + 1024 * half);
        }
    }
}

static void pack_blocks(const Factor *factor, int64_t block, int64_t blocks, int64_t step, int64_t steps, char *to) {
    SPECIALIZED(wide, factor->is_wide, SPECIALIZED(is_contiguous, factor->of_depth == 1, SPECIALIZED(by_pairs, factor->by_pairs,
        pack_blocks_of(wide, is_contiguous, by_pairs, factor, block, blocks, step, steps, to))));
}

/* ------------------------------------------------------------------------------------------------ products */

/* A block of A: where it begins, and bytes between its tiles, between lines and between steps. */
typedef struct {
    const char *at;
    int64_t below, line, step;
} Rows;

/* Whether tiles can be loaded from A itself: whole blocks in bf16, in lines of the cache that are not all of one set. */
static int can_load(const Call *call, const void *a) {
    int64_t row = call->a[0];
    return !call->a_is_wide && call->a[1] == 1 && call->depth % BLOCK == 0 && row % BLOCK == 0 && row % 512 && (intptr_t)a % 64 == 0;
}

/* The sums of a pair of blocks, four tiles of 16 × 16: initialized or increased by some steps. */
WITH_TILES static void add_steps(int64_t from, int64_t steps, const Rows *a, const char *b, float *sums, int begins) {
    const char *at = a->at + from * a->step;
    begin_sums(begins, sums, 256, 512, 16);
    for (int64_t step = from; step < from + steps; step++, at += a->step)
        add_to_sums(1, at, at + a->below, a->line, b + step * OF_STEP, b + step * OF_STEP + 1024, 64);
    store_sums(sums, 256, 512, 16);
}

/* 16 values of the bias row. */
static __m512 bias_at(const Call *call, const void *bias, int64_t column) {
    __mmask16 here = first(call->columns - column);
    if (!bias) return _mm512_setzero_ps();
    if (call->bias_is_wide) return _mm512_maskz_loadu_ps(here, element(1, bias, column));
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, element(0, bias, column)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

/* Writes the sums of a pair of blocks, plus the bias row. */
static void write_block(const Call *call, const float *sums, const void *bias, char *out, int64_t row, int64_t column) {
    __mmask32 here = first_of_32(call->columns - column);
    __m512 added = bias_at(call, bias, column), added_right = bias_at(call, bias, column + 16);
    int64_t size = call->is_wide ? 4 : 2;
    for (int64_t i = 0; i < least(BLOCK, call->rows - row); i++) {
        const float *from = sums + 512 * (i / 16) + 16 * (i % 16);
        __m512 left = _mm512_add_ps(_mm512_load_ps(from), added);
        __m512 right = _mm512_add_ps(_mm512_load_ps(from + 256), added_right);
        char *to = out + size * ((row + i) * call->out_row + column);
        if (call->is_wide) {
            _mm512_mask_storeu_ps(to, (__mmask16)here, left);
            _mm512_mask_storeu_ps(to + 64, (__mmask16)(here >> 16), right);
        } else {
            _mm512_mask_storeu_epi16(to, here, (__m512i)_mm512_cvtne2ps_pbh(right, left));
        }
    }
}

/* Computes one of the parts of the result, with `scratch` for all of them. */
static void multiply_by_tiles(const Call *call, const Tiling *tiling, const void *a, const void *b, const void *bias, char *out,
                              char *scratch, int64_t part) {
    char *packed_a = scratch + part * tiling->own, *packed_b = packed_a + tiling->of_a;
    float *all = (float *)(packed_b + tiling->of_b);
    Factor of_a = {a, call->a_is_wide, call->a[1], call->a[0], call->depth, call->rows, 0};
    Factor of_b = {b, call->b_is_wide, call->b[0], call->b[1], call->depth, call->columns, 1};
    int64_t rows = divided(call->rows, BLOCK), columns = divided(call->columns, BLOCK), depth = divided(call->depth, BLOCK);
    int64_t of_rows = part % tiling->row_parts, of_columns = part / tiling->row_parts;
    int64_t last_row = rows * (of_rows + 1) / tiling->row_parts, first_column = columns * of_columns / tiling->column_parts;
    int64_t last_column = columns * (of_columns + 1) / tiling->column_parts;
    int64_t loads = can_load(call, a), a_row = call->a[0];
    const uint8_t full[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    begin_tiles(full, full);
    for (int64_t row = rows * of_rows / tiling->row_parts; row < last_row; row += tiling->rows)
        for (int64_t column = first_column; column < last_column; column += tiling->columns)
            for (int64_t from = 0; from < depth; from += tiling->steps) {
                int64_t here = least(tiling->rows, last_row - row), wide = least(tiling->columns, last_column - column);
                int64_t steps = least(tiling->steps, depth - from), most = divided(steps, divided(steps, STEPS));
                pack_blocks(&of_b, column, wide, from, steps, packed_b);
                for (int64_t i = 0; i < here; i++) {
                    int64_t held = i % tiling->rows_at_once;
                    Rows block = {packed_a + held * steps * OF_STEP, 1024, 64, OF_STEP};
                    if (loads && (row + i + 1) * BLOCK <= call->rows)
                        block = (Rows){element(0, a, (row + i) * BLOCK * a_row + from * BLOCK), 32 * a_row, 2 * a_row, 2 * BLOCK};
                    else if (!held)
                        pack_blocks(&of_a, row + i, least(tiling->rows_at_once, here - i), from, steps, packed_a);
                    float *of_row = all + (tiling->is_divided ? i * tiling->columns : 0) * SUMS;
                    for (int64_t step = 0; step < steps; step += most) {
                        int writes = from + steps == depth && step + most >= steps;
                        /* A block is written behind the next one's steps, so that its sums are not waited for. */
                        for (int64_t j = 0; j < wide + writes; j++) {
                            if (j < wide)
                                add_steps(step, least(most, steps - step), &block, packed_b + j * steps * OF_STEP,
                                          of_row + j * SUMS, from + step == 0);
                            if (writes && j)
                                write_block(call, of_row + (j - 1) * SUMS, bias, out, (row + i) * BLOCK, (column + j - 1) * BLOCK);
                        }
                    }
                }
            }
    end_tiles();
}
#else
typedef struct { int64_t row_parts, column_parts; } Tiling;
static Tiling tiling_of(const Call *call, int64_t threads) {
    Tiling tiling = {call->rows, threads};
    return tiling;
}
static int64_t bytes_of_tiling(const Tiling *tiling) { return tiling->row_parts; }
static void multiply_by_tiles(const Call *call, const Tiling *tiling, const void *a, const void *b, const void *bias, char *out,
                              char *scratch, int64_t part) {
    (void)call, (void)tiling, (void)a, (void)b, (void)bias, (void)out, (void)scratch, (void)part;
}
#endif
