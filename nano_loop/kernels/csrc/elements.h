/* Loads and stores of fp32 vectors for bf16 or fp32 tensors, at every instruction set level. */
#pragma once
#include "lanes.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));

INLINE Vector load(const void *base, int64_t at, int bf16) {
    Vector value;
    if (bf16) {
        halves raw;
        memcpy(&raw, (const uint16_t *)base + at, sizeof raw);
#if WIDTH == 8 /* gcc would convert each half */
        Words wide = (Words)_mm256_cvtepu16_epi32((__m128i)raw) << 16;
#else
        Words wide = __builtin_convertvector(raw, Words) << 16;
#endif
        memcpy(&value, &wide, sizeof value);
    } else
        memcpy(&value, (const float *)base + at, sizeof value);
    return value;
}

/* Rounds to the nearest bf16, ties to even, as torch does; preserves NaN. */
INLINE void store(void *base, int64_t at, int bf16, Vector value) {
    if (bf16) {
#if defined(__AVX512BF16__)
        __m256bh half = _mm512_cvtneps_pbh((__m512)value);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        bfloat16x4_t half = vcvt_bf16_f32((float32x4_t)value);
#elif WIDTH == 8 /* like the code below, with fewer instructions */
        const __m256 none = (__m256)_mm256_set1_epi32(0x7fc00000);
        Words raw = (Words)value, nan = (Words)(value != value);
        raw = raw + 0x7fff + ((raw >> 16) & 1);
        raw = (Words)_mm256_blendv_ps((__m256)raw, none, (__m256)nan) >> 16;
        __m128i low = _mm256_castsi256_si128((__m256i)raw), high = _mm256_extracti128_si256((__m256i)raw, 1);
        __m128i half = _mm_packus_epi32(low, high);
#else
        Words raw, nan = (Words)(value != value);
        memcpy(&raw, &value, sizeof raw);
        raw = (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
        halves half = __builtin_convertvector((raw & ~nan) | (nan & 0x7fc0), halves);
#endif
        memcpy((uint16_t *)base + at, &half, sizeof half);
    } else
        memcpy((float *)base + at, &value, sizeof value);
}

INLINE Vector all(float value) { return (Vector){0} + value; }

/* Adds fp32 values to double-precision sums. */
INLINE void add_to(double *sums, const Vector *vectors, int count) {
    float numbers[4 * WIDTH];
    memcpy(numbers, vectors, (size_t)count * sizeof *numbers);
    for (int i = 0; i < count; i++) sums[i] += numbers[i];
}
