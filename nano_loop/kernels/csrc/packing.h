/* Packs values in the format of AVX-512's bf16 products: two values that are summed together in one word.

   A source has bf16 values or, if it is `wide`, fp32 values. These are rounded to nearest, ties to even. Values below
   2^-126 become 0, as the product instructions treat them. */
#pragma once
#include "transpose.h"

#define TILE 64 /* columns of a packed tile: four vectors */

INLINE __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }
INLINE __mmask32 first_of_32(int64_t count) {
    return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (__mmask32)((1u << count) - 1);
}

/* The address of an element at an offset of `count`. */
INLINE const void *element(const int wide, const void *from, int64_t count) {
    return (const char *)from + count * (wide ? 4 : 2);
}

/* Loads 32 values in bf16. */
INLINE __m512i loaded(const int wide, __mmask32 here, const void *from) {
    if (!wide) return _mm512_maskz_loadu_epi16(here, from);
    __m512 low = _mm512_maskz_loadu_ps((__mmask16)here, from);
    __m512 high = _mm512_maskz_loadu_ps((__mmask16)(here >> 16), element(1, from, 16));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Loads 16 contiguous values in bf16. */
INLINE __m256i sixteen(const int wide, __mmask16 here, const void *from) {
    return wide ? (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(here, from)) : _mm256_maskz_loadu_epi16(here, from);
}

/* Writes 32 words: each value of `low` paired with the value of `high`, or with 0 if `high` is NULL. */
INLINE void interleave_of(const int wide, const void *low, const void *high, __mmask32 here, uint32_t *to) {
    const __m512i firsts = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                            37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i lasts = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54,
                                           22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    __m512i a = loaded(wide, here, low);
    __m512i b = high ? loaded(wide, here, high) : _mm512_setzero_si512();
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, firsts, b));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, lasts, b));
}

/* 16 words with the values of `low` in the lower halves and those of `high` in the upper halves. */
INLINE __m512i paired(__m256i low, __m256i high) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

/* Packs an AMX tile of 16 rows or columns, `count` of which exist, for the existing part of `depth`: all, if `full`.
   Each line has one row, or one pair along the depth. `apart` is the stride of contiguous rows, or else of the depth. */
INLINE void pack_tile_of(const int full, const int wide, const int is_contiguous, const int by_pairs, const void *from, int64_t apart,
                      int64_t count, int64_t depth, char *to) {
    __m512i lines[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (is_contiguous) {
            lines[i] = full || i < count ? loaded(wide, full ? ~0u : first_of_32(depth), element(wide, from, i * apart)) : _mm512_setzero_si512();
            continue;
        }
        const void *low = element(wide, from, 2 * i * apart), *high = element(wide, low, apart);
        __m256i none = _mm256_setzero_si256();
        lines[i] = paired(full || 2 * i < depth ? sixteen(wide, full ? 0xffff : first(count), low) : none,
                          full || 2 * i + 1 < depth ? sixteen(wide, full ? 0xffff : first(count), high) : none);
    }
    if (is_contiguous == by_pairs) transpose((Vector *)lines);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 64 * i, lines[i]);
}

INLINE void pack_tile(const int wide, const int is_contiguous, const int by_pairs, const void *from, int64_t apart,
                      int64_t count, int64_t depth, char *to) {
    SPECIALIZED(full, count >= 16 && depth >= 32, pack_tile_of(full, wide, is_contiguous, by_pairs, from, apart, count, depth, to));
}

/* Packs 16 columns of a tile: rows of a matrix whose transpose is the second factor. Each pair of its columns becomes a
   row of words. Missing rows, and a missing second column of the last pair, are zero-padded. */
INLINE void pack_group_of(const int wide, const void *from, int64_t row, int64_t rows, int64_t width, uint32_t *to) {
    int64_t pairs = divided(width, 2);
    for (int64_t pair = 0; pair < pairs; pair += 16) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = i < rows ? loaded(wide, first_of_32(width - 2 * pair), element(wide, from, i * row + 2 * pair))
                            : _mm512_setzero_si512();
        transpose((Vector *)r);
        int64_t count = least(16, pairs - pair);
        for (int64_t i = 0; i < count; i++) _mm512_storeu_si512(to + (pair + i) * TILE, r[i]);
    }
}

/* Packs a matrix whose transpose is the second factor, as tiles of 64 rows. */
INLINE void pack_transposed_of(const int wide, const void *from, int64_t row, int64_t rows, int64_t width, uint32_t *to) {
    for (int64_t tile = 0; tile < rows; tile += TILE, to += divided(width, 2) * TILE)
        for (int64_t group = 0; group < TILE; group += 16)
            pack_group_of(wide, element(wide, from, (tile + group) * row), row, rows - tile - group, width, to + group);
}

/* Packs a matrix that is the second factor, as tiles of 64 columns in which each pair of rows becomes a row of words.
   Missing columns, and a missing second row of the last pair, are zero-padded. */
INLINE void pack_pairs_of(const int wide, const void *from, int64_t row, int64_t rows, int64_t width, uint32_t *to) {
    int64_t pairs = divided(rows, 2);
    for (int64_t tile = 0; tile < width; tile += TILE, to += pairs * TILE)
        for (int64_t pair = 0; pair < pairs; pair++) {
            const void *low = element(wide, from, 2 * pair * row + tile);
            const void *high = 2 * pair + 1 < rows ? element(wide, low, row) : 0;
            for (int64_t at = 0; at < TILE; at += 32)
                interleave_of(wide, element(wide, low, at), high ? element(wide, high, at) : 0,
                              first_of_32(width - tile - at), to + pair * TILE + at);
        }
}

static inline void pack_transposed(const uint16_t *from, int64_t row, int64_t rows, int64_t width, uint32_t *to) {
    pack_transposed_of(0, from, row, rows, width, to);
}

static inline void pack_pairs(const uint16_t *from, int64_t row, int64_t rows, int64_t width, uint32_t *to) {
    pack_pairs_of(0, from, row, rows, width, to);
}
