/* fp32 vectors for any CPU, by the vector extensions of GCC and clang. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Values per vector: one register. Wider vectors would be in memory. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t divided(int64_t number, int64_t by) { return (number + by - 1) / by; }
INLINE int64_t up_to(int64_t number, int64_t multiple) { return divided(number, multiple) * multiple; }

/* Evaluates CALL, in which NAME is a constant with the value of a flag: inline functions are compiled for both values. */
#define SPECIALIZED(NAME, FLAG, CALL)                                                                                  \
    do {                                                                                                               \
        if (FLAG) {                                                                                                    \
            const int NAME = 1;                                                                                        \
            CALL;                                                                                                      \
        } else {                                                                                                       \
            const int NAME = 0;                                                                                        \
            CALL;                                                                                                      \
        }                                                                                                              \
    } while (0)

/* Selects the bits of `yes` where a comparison is true, and of `no` elsewhere. */
#define CHOOSE(CONDITION, YES, NO)                                                                                     \
    ({                                                                                                                 \
        Words mask = (Words)(CONDITION);                                                                               \
        (Vector)((mask & (Words)(YES)) | (~mask & (Words)(NO)));                                                       \
    })

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
