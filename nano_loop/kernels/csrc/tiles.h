/* Products of small bf16 matrices that lie in the cache, with fp32 results, by the bf16 instructions of AVX-512. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "packing.h"

/* C (mr × 16·nv, fp32) = or += A B. `a` has pairs of bf16 numbers at a row and at a pair of positions apart, in bytes;
   `b` has for each pair of positions a row of TILE such pairs. */
INLINE void product_of_tile(const int mr, const int nv, int64_t pairs, const char *a, int64_t a_row, int64_t a_pair,
                            const uint32_t *b, float *c, int64_t c_row, int added) {
    __m512 sums[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) sums[i][j] = added ? _mm512_loadu_ps(c + i * c_row + 16 * j) : _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh columns[4];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) columns[j] = (__m512bh)_mm512_loadu_si512(b + k * TILE + 16 * j);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            int pair;
            memcpy(&pair, a + i * a_row + k * a_pair, sizeof pair);
            __m512bh of_row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], of_row, columns[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) _mm512_storeu_ps(c + i * c_row + 16 * j, sums[i][j]);
}

#define OF_ROWS(NV)                                                                                                    \
    static void product_##NV(int64_t rows, int64_t pairs, const char *a, int64_t a_row, int64_t a_pair,                \
                             const uint32_t *b, float *c, int64_t c_row, int added) {                                  \
        int64_t i = 0;                                                                                                 \
        for (; i + 6 <= rows; i += 6)                                                                                  \
            product_of_tile(6, NV, pairs, a + i * a_row, a_row, a_pair, b, c + i * c_row, c_row, added);               \
        a += i * a_row, c += i * c_row;                                                                                \
        switch (rows - i) {                                                                                            \
            case 1: product_of_tile(1, NV, pairs, a, a_row, a_pair, b, c, c_row, added); break;                        \
            case 2: product_of_tile(2, NV, pairs, a, a_row, a_pair, b, c, c_row, added); break;                        \
            case 3: product_of_tile(3, NV, pairs, a, a_row, a_pair, b, c, c_row, added); break;                        \
            case 4: product_of_tile(4, NV, pairs, a, a_row, a_pair, b, c, c_row, added); break;                        \
            case 5: product_of_tile(5, NV, pairs, a, a_row, a_pair, b, c, c_row, added); break;                        \
        }                                                                                                              \
    }
OF_ROWS(1)
OF_ROWS(2)
OF_ROWS(3)
OF_ROWS(4)

/* C (rows × columns) = or += A B, with B in tiles of `b_pairs` rows. Columns are filled up to a multiple of 16. */
static void product(int64_t rows, int64_t columns, int64_t pairs, const void *a, int64_t a_row, int64_t a_pair,
                    const uint32_t *b, int64_t b_pairs, float *c, int64_t c_row, int added) {
    for (int64_t at = 0; at < columns; at += TILE, b += b_pairs * TILE, c += TILE) {
        switch ((least(columns - at, TILE) + 15) / 16) {
            case 1: product_1(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            case 2: product_2(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            case 3: product_3(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            default: product_4(rows, pairs, a, a_row, a_pair, b, c, c_row, added);
        }
    }
}
