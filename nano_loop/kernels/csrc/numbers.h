/* bf16 and fp32 values, and exponentials, for the kernels in this folder. */
#pragma once
#include <stdint.h>
#include <string.h>

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_float(float value) { return value; }
static inline float from_bf16(uint16_t value) { return of_bits((uint32_t)value << 16); }
static inline float to_float(float value) { return value; }

/* Rounds to nearest, ties to even, as torch does; preserves NaN. */
static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

/* exp(x) for x <= 88, as in Cephes' expf: 2^n times a polynomial of the remainder. Below -87 it is 0. Comparisons are
   written such that NaN is preserved. */
static inline float exponential(float x) {
    float clipped = !(x < -87.0f) ? x : -87.0f;
    float shifted = clipped * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    float n = shifted - 12582912.0f;
    float r = clipped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float scaled = p * of_bits((bits_of(shifted) + 127u) << 23);
    return x < -87.0f ? 0.0f : scaled;
}
