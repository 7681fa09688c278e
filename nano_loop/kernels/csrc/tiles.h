/* Products of small bf16 matrices in the cache, with fp32 results, by the bf16 instructions of AVX-512 or by AMX. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "amx.h"
#include "packing.h"

/* C (mr × 16·nv, fp32) = or += A B. `a` has pairs of bf16 values with these strides of rows and pairs in bytes; `b` has
   a row of TILE such pairs for each pair along the depth. */
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

#ifdef HAS_AMX
#define MOST_TURNED 32 /* maximum number of pairs of a factor with contiguous rows */

/* C (up to 16 rows × 16·nv) = or += A B. `a_step` is the stride of steps of 16 pairs in bytes. */
WITH_TILES static void add_tiles(int64_t nv, int64_t pairs, const char *a, int64_t a_row, int64_t a_step, const uint32_t *b,
                                 float *c, int64_t c_row, int added) {
#define EACH(DO) DO(0) if (nv > 1) { DO(1) } if (nv > 2) { DO(2) } if (nv > 3) { DO(3) }
#define BEGIN(J) if (added) { _tile_loadd(J, c + 16 * J, 4 * c_row); } else { _tile_zero(J); }
#define ADD(J) _tile_loadd(5, b + 16 * J, 4 * TILE); _tile_dpbf16ps(J, 4, 5);
#define ADD_REST(J) _tile_loadd(7, b + 16 * J, 4 * TILE); _tile_dpbf16ps(J, 6, 7);
#define END(J) _tile_stored(J, c + 16 * J, 4 * c_row);
    MEMORY_CHANGES;
    EACH(BEGIN)
    for (; pairs >= 16; pairs -= 16, a += a_step, b += 16 * TILE) {
        _tile_loadd(4, a, a_row);
        EACH(ADD)
    }
    if (pairs) {
        _tile_loadd(6, a, a_row);
        EACH(ADD_REST)
    }
    EACH(END)
    MEMORY_CHANGES;
#undef EACH
#undef BEGIN
#undef ADD
#undef ADD_REST
#undef END
}

/* Like product(), by AMX. Tiles 0 to 3 hold C; two tiles hold A and B for 16 pairs, and two the remaining pairs. */
static void product_by_tiles(int64_t rows, int64_t columns, int64_t pairs, const char *a, int64_t a_row, int64_t a_pair,
                             const uint32_t *b, int64_t b_pairs, float *c, int64_t c_row, int added) {
    uint32_t turned[16 * MOST_TURNED] __attribute__((aligned(64)));
    uint8_t rest = (uint8_t)(pairs % 16 ? pairs % 16 : 16), before = 0;
    for (int64_t i = 0; i < rows; i += 16, a += 16 * a_row, c += 16 * c_row) {
        uint8_t here = (uint8_t)least(16, rows - i);
        const uint8_t lines[8] = {here, here, here, here, here, 16, here, rest}, words[8] = {16, 16, 16, 16, 16, 16, rest, 16};
        if (here != before) begin_tiles(lines, words);
        before = here;
        const char *of_rows = a;
        if (a_pair != 4) {
            for (int64_t pair = 0; pair < pairs; pair += 16) {
                __m512i r[16];
#pragma GCC unroll 16
                for (int k = 0; k < 16; k++)
                    r[k] = pair + k < pairs ? _mm512_loadu_si512(a + (pair + k) * a_pair) : _mm512_setzero_si512();
                transpose((Vector *)r);
#pragma GCC unroll 16
                for (int k = 0; k < 16; k++) _mm512_store_si512(turned + 16 * (pair + k), r[k]);
            }
            of_rows = (const char *)turned;
        }
        for (int64_t at = 0; at < columns; at += TILE)
            add_tiles(divided(least(columns - at, TILE), 16), pairs, of_rows, a_pair == 4 ? a_row : 64, a_pair == 4 ? 64 : 1024,
                      b + at * b_pairs, c + at, c_row, added);
    }
    end_tiles();
}
#endif

/* C (rows × columns) = or += A B, with B in tiles of `b_pairs` rows. Columns are padded to a multiple of 16. */
static void product(int64_t by_tiles, int64_t rows, int64_t columns, int64_t pairs, const void *a, int64_t a_row, int64_t a_pair,
                    const uint32_t *b, int64_t b_pairs, float *c, int64_t c_row, int added) {
#ifdef HAS_AMX
    if (by_tiles && (a_pair == 4 || (a_row == 4 && pairs <= MOST_TURNED))) {
        product_by_tiles(rows, columns, pairs, a, a_row, a_pair, b, b_pairs, c, c_row, added);
        return;
    }
#endif
    for (int64_t at = 0; at < columns; at += TILE, b += b_pairs * TILE, c += TILE) {
        switch ((least(columns - at, TILE) + 15) / 16) {
            case 1: product_1(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            case 2: product_2(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            case 3: product_3(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            default: product_4(rows, pairs, a, a_row, a_pair, b, c, c_row, added);
        }
    }
}
