/* Products of fp32 matrices with any strides: A B, or A B plus a row.

   MKL uses only AVX2 on non-Intel CPUs, even if they have AVX-512.

   Sums are computed over blocks of the depth. A tile of columns of B is read in place, or packed if its rows are far
   apart or its columns contiguous, and is multiplied with all rows of A. Rows of A are packed first if A is
   column-major, as in a weight gradient. Each element is summed in an order independent of the number of threads. */
#pragma once
#include "fp32_tiles.h"

#define BLOCK 256          /* depth that is summed at a time, so that it and a tile stay in the cache */
#define PANEL (16 * ROWS)  /* rows of A that are packed at a time */
#define FEW_ROWS (4 * ROWS) /* up to this many rows, tiles that can be read in place are not packed */
#define NEAR (4 * TILE)    /* maximum row stride of a tile that is read in place */
#define FEW_TILES 2        /* up to this many tiles, rows of A are not packed */

/* Sizes, row strides and column strides. */
typedef struct {
    int64_t rows, columns, depth, a_row, a_step, b_step, b_column;
} Shape;

/* A call and its tensors. */
typedef struct {
    const Shape *call;
    const float *a, *b, *bias;
    float *out;
} Work;

/* Packs rows of A: the values of rows that are multiplied together are contiguous for each depth index. */
static void pack_rows(const Shape *call, const float *a, int64_t rows, int64_t depth, float *panel) {
    for (int64_t row = 0; row < rows; row += ROWS, panel += depth * ROWS) {
        const float *from = a + row * call->a_row;
        if (call->a_row == 1 && row + ROWS <= rows) {
            for (int64_t k = 0; k < depth; k++) memcpy(panel + k * ROWS, from + k * call->a_step, 4 * ROWS);
            continue;
        }
        for (int64_t k = 0; k < depth; k++)
            for (int64_t i = 0; i < least(ROWS, rows - row); i++)
                panel[k * ROWS + i] = from[i * call->a_row + k * call->a_step];
    }
}

/* ------------------------------------------------------------------------------------------------ products */

/* Adds the sums of a block of the depth to a tile of the result, or writes them plus the added row. */
INLINE void add_sums(const Work *work, const float *sums, int64_t row, int64_t rows, int64_t column, int64_t width,
                     int is_first) {
    int64_t columns = work->call->columns;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j += WIDTH) {
            int64_t count = columns - column - j;
            float *to = work->out + (row + i) * columns + column + j;
            Vector sum = *(const Unaligned *)(sums + i * TILE + j);
            if (!is_first) sum += load(to, count);
            else if (work->bias) sum += load(work->bias + column + j, count);
            store(to, count, sum);
        }
}

/* Computes some rows of some columns: tiles start at multiples of `TILE`. */
static void multiply(const Work *work, int64_t begin, int64_t end, int64_t column, int64_t last) {
    const Shape *call = work->call;
    float packed[BLOCK * TILE] __attribute__((aligned(64))), panel[BLOCK * PANEL] __attribute__((aligned(64)));
    float sums[ROWS * TILE] __attribute__((aligned(64)));
    const float *from[ROWS];
    int packs_a = call->a_step != 1 && last - column > FEW_TILES * TILE;
    int is_near = call->b_column == 1 && (call->b_step <= NEAR || end - begin <= FEW_ROWS);
    int64_t rows_at_a_time = packs_a ? PANEL : end - begin;
    for (int64_t k = 0; k < call->depth; k += BLOCK)
        for (int64_t top = begin; top < end; top += rows_at_a_time) {
            int64_t depth = least(BLOCK, call->depth - k), bottom = least(end, top + rows_at_a_time);
            const float *a = work->a + top * call->a_row + k * call->a_step;
            if (packs_a) pack_rows(call, a, bottom - top, depth, panel);
            for (int64_t at = column; at < last; at += TILE) {
                int64_t width = vectors_at(at, call->columns) * WIDTH, step = call->b_step;
                const float *tile = work->b + k * call->b_step + at * call->b_column;
                if (!is_near || at + width > call->columns) {
                    pack_tile(tile, call->b_step, call->b_column, call->columns - at, depth, width, packed);
                    tile = packed, step = width;
                }
                for (int64_t row = top; row < bottom; row += ROWS) {
                    int64_t rows = least(ROWS, bottom - row), here = row - top;
                    for (int64_t i = 0; i < rows; i++)
                        from[i] = packs_a ? panel + here * depth + i : a + (here + i) * call->a_row;
                    IN_FP32[width / WIDTH - 1](rows, depth, from, packs_a ? ROWS : call->a_step, tile, step, sums);
                    add_sums(work, sums, row, rows, at, width, k == 0);
                }
            }
        }
}
