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

/* Up to 1 a polynomial that was fitted to a relative error of 7e-9, beyond it 1 - 2e / (1 + e) with e = exp(-2|x|). */
INLINE Vector hyperbolic_tangent(Vector x) {
    Vector size = magnitude(x), square = x * x, e = exponential(-2.0f * size);
    Vector p = square * -0.0003584508958738297f + 0.0023013607133179903f;
    p = p * square - 0.007946101017296314f;
    p = p * square + 0.02148665301501751f;
    p = p * square - 0.05387980118393898f;
    p = p * square + 0.13332344591617584f;
    p = p * square - 0.33333295583724976f;
    Vector beyond = 1.0f - 2.0f * e / (1.0f + e);
    Vector with_sign = (Vector)((Words)beyond | ((Words)x & 0x80000000u));
    return CHOOSE(size < 1.0f, x + x * (square * p), with_sign);
}

/* exp(x) - 1 of numbers that are not larger than 0: 2t / (1 - t) with t = tanh(x / 2), in which nothing cancels. */
INLINE Vector exponential_less_1(Vector x) {
    Vector t = hyperbolic_tangent(x * 0.5f);
    return 2.0f * t / (1.0f - t);
}
