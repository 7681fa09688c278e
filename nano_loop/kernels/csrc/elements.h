/* Vectors of fp32 numbers from tensors in bf16 or fp32, at every level of instructions. */
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Lanes of a register. Wider vectors would lie in memory. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float vector __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));

INLINE vector load(const void *base, int64_t at, int bf16) {
    vector value;
    if (bf16) {
        halves raw;
        memcpy(&raw, (const uint16_t *)base + at, sizeof raw);
#if WIDTH == 8 /* gcc would convert each half */
        bits wide = (bits)_mm256_cvtepu16_epi32((__m128i)raw) << 16;
#else
        bits wide = __builtin_convertvector(raw, bits) << 16;
#endif
        memcpy(&value, &wide, sizeof value);
    } else
        memcpy(&value, (const float *)base + at, sizeof value);
    return value;
}

/* bf16 is the nearest, and of two as near the even one, as torch rounds; a NaN stays one. */
INLINE void store(void *base, int64_t at, int bf16, vector value) {
    if (bf16) {
#if defined(__AVX512BF16__)
        __m256bh half = _mm512_cvtneps_pbh((__m512)value);
#elif WIDTH == 8 /* the same as below, in fewer instructions */
        const __m256 none = (__m256)_mm256_set1_epi32(0x7fc00000);
        bits raw = (bits)value, nan = (bits)(value != value);
        raw = raw + 0x7fff + ((raw >> 16) & 1);
        raw = (bits)_mm256_blendv_ps((__m256)raw, none, (__m256)nan) >> 16;
        __m128i low = _mm256_castsi256_si128((__m256i)raw), high = _mm256_extracti128_si256((__m256i)raw, 1);
        __m128i half = _mm_packus_epi32(low, high);
#else
        bits raw, nan = (bits)(value != value);
        memcpy(&raw, &value, sizeof raw);
        raw = (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
        halves half = __builtin_convertvector((raw & ~nan) | (nan & 0x7fc0), halves);
#endif
        memcpy((uint16_t *)base + at, &half, sizeof half);
    } else
        memcpy((float *)base + at, &value, sizeof value);
}

/* A number as `store` would leave it. */
INLINE vector rounded(vector value, int bf16) {
    uint16_t raw[WIDTH];
    if (!bf16) return value;
    store(raw, 0, 1, value);
    return load(raw, 0, 1);
}

INLINE vector all(float value) { return (vector){0} + value; }

/* Adds numbers in fp32 to others in double precision. */
INLINE void add_to(double *sums, const vector *vectors, int count) {
    float numbers[4 * WIDTH];
    memcpy(numbers, vectors, (size_t)count * sizeof *numbers);
    for (int i = 0; i < count; i++) sums[i] += numbers[i];
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
