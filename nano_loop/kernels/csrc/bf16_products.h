/* Products of a few rows with the columns of a packed tile, by the bf16 instructions of AVX-512, which sum the products
   of two pairs of values. */
#pragma once
#include "lanes.h"

/* C (rows × 16·vectors, fp32) = or += A B. Rows of A have pairs of bf16 values with a stride of `a_pair` bytes. B has
   such pairs for each column, and a stride of `b_pair` words between pairs along the depth. */
INLINE void product_of_pairs(const int rows, const int vectors, int64_t pairs, const char *const *a, int64_t a_pair,
                             const void *b, int64_t b_pair, float *c, int64_t c_row, int added) {
    __m512 sums[6][4];
    const char *of_rows[6];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        of_rows[i] = a[i];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sums[i][j] = added ? _mm512_loadu_ps(c + i * c_row + 16 * j) : _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh columns[4];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            columns[j] = (__m512bh)_mm512_loadu_si512((const uint32_t *)b + k * b_pair + 16 * j);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            int pair;
            memcpy(&pair, of_rows[i] + k * a_pair, sizeof pair);
            __m512bh of_row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], of_row, columns[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) _mm512_storeu_ps(c + i * c_row + 16 * j, sums[i][j]);
}
