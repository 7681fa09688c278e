/* The exponential function, for any CPU. */
#pragma once
#include "lanes.h"

/* Returns p, and 2^n in `power`, such that exp(x) = 2^n (1 + p) for -87 <= x <= 87, as in Cephes' expf. */
INLINE Vector exponential_parts(Vector x, Vector *power) {
    Vector shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    Vector n = shifted - 12582912.0f;
    Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *power = (Vector)(((Words)shifted + 127u) << 23);
    return p * (r * r) + r;
}

/* exp(x) for x <= 0. Below -87 it is 0. NaN is preserved. */
INLINE Vector exponential(Vector x) {
    const Vector zero = {0}, lowest = zero - 87.0f;
    Vector power;
#if defined(__AVX512F__)
    __mmask16 is_large = _mm512_cmp_ps_mask((__m512)x, (__m512)lowest, _CMP_NLT_UQ);
    Vector p = exponential_parts((Vector)_mm512_max_ps((__m512)lowest, (__m512)x), &power);
    return (Vector)_mm512_maskz_mul_ps(is_large, (__m512)(p + 1.0f), (__m512)power);
#else
    Vector p = exponential_parts(CHOOSE(x < lowest, lowest, x), &power);
    return CHOOSE(x < lowest, zero, (p + 1.0f) * power);
#endif
}
