/* Functions of vectors of fp32 numbers, for any CPU. */
#pragma once
#include "exponential.h"

INLINE Vector magnitude(Vector x) { return (Vector)((Words)x & 0x7fffffffu); }

/* exp of numbers that are not larger than 0. Below -87 it is 0. A NaN stays one. */
INLINE Vector exponential(Vector x) {
    const Vector zero = {0};
    Vector power, p = exponential_parts(CHOOSE(x < -87.0f, zero - 87.0f, x), &power);
    return CHOOSE(x < -87.0f, zero, (p + 1.0f) * power);
}

/* 1 / x of numbers from 1 to 2, by one step of Newton where that is faster than a division. */
INLINE Vector reciprocal(Vector x) {
#ifdef __AVX512F__
    Vector near = (Vector)_mm512_rcp14_ps((__m512)x);
    return near + near * (1.0f - x * near);
#else
    return 1.0f / x;
#endif
}

INLINE Vector sigmoid(Vector x) {
    Vector e = exponential(-magnitude(x)), larger = reciprocal(1.0f + e);
    return CHOOSE(x < 0.0f, e * larger, larger);
}
