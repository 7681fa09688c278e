/* Products of small bf16 matrices in the cache, with fp32 results, by the bf16 instructions of AVX-512 or by AMX. */
#pragma once
#include "amx.h"
#include "bf16_products.h"
#include "packing.h"

/* C (rows × 16·NV, fp32) = or += A B. `a` has pairs of bf16 values with these strides of rows and pairs in bytes; `b`
   has a row of TILE such pairs for each pair along the depth. */
#define OF_VECTORS(NV)                                                                                                 \
    static void product_##NV(int64_t rows, int64_t pairs, const char *a, int64_t a_row, int64_t a_pair,                \
                             const uint32_t *b, float *c, int64_t c_row, int added) {                                  \
        for (; rows > 0; rows -= 6, a += 6 * a_row, c += 6 * c_row) {                                                  \
            const char *of_rows[6] = {a, a + a_row, a + 2 * a_row, a + 3 * a_row, a + 4 * a_row, a + 5 * a_row};       \
            switch (rows) {                                                                                            \
                case 1: product_of_pairs(1, NV, pairs, of_rows, a_pair, b, TILE, c, c_row, added); break;              \
                case 2: product_of_pairs(2, NV, pairs, of_rows, a_pair, b, TILE, c, c_row, added); break;              \
                case 3: product_of_pairs(3, NV, pairs, of_rows, a_pair, b, TILE, c, c_row, added); break;              \
                case 4: product_of_pairs(4, NV, pairs, of_rows, a_pair, b, TILE, c, c_row, added); break;              \
                case 5: product_of_pairs(5, NV, pairs, of_rows, a_pair, b, TILE, c, c_row, added); break;              \
                default: product_of_pairs(6, NV, pairs, of_rows, a_pair, b, TILE, c, c_row, added);                    \
            }                                                                                                          \
        }                                                                                                              \
    }
OF_VECTORS(1)
OF_VECTORS(2)
OF_VECTORS(3)
OF_VECTORS(4)

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
        switch (divided(least(columns - at, TILE), 16)) {
            case 1: product_1(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            case 2: product_2(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            case 3: product_3(rows, pairs, a, a_row, a_pair, b, c, c_row, added); break;
            default: product_4(rows, pairs, a, a_row, a_pair, b, c, c_row, added);
        }
    }
}
