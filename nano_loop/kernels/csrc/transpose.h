/* The transpose of a square of vectors: gcc only if vectors have fewer than 16 values. */
#pragma once
#include "lanes.h"

/* Transposes a square of vectors in registers. */
INLINE void transpose(Vector *rows) {
#if WIDTH == 16
    __m512i t[16], *r = (__m512i *)rows;
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
#else
#if WIDTH == 8
    const Words firsts = {0, 8, 1, 9, 2, 10, 3, 11};
#else
    const Words firsts = {0, 4, 1, 5};
#endif
    const Words lasts = firsts + WIDTH / 2;
#pragma GCC unroll 4
    for (int stage = 1; stage < WIDTH; stage *= 2) {
        Vector next[WIDTH];
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH / 2; i++) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + WIDTH / 2], firsts);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + WIDTH / 2], lasts);
        }
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) rows[i] = next[i];
    }
#endif
}
