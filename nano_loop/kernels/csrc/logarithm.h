/* The natural logarithm. That of the C library has another version since glibc 2.29, which what is linked against it would
   need. */
#pragma once
#include <stdint.h>
#include <string.h>

/* Of 0, and of a number from 1 on, to within 1e-15 of the result. x = m 2^e with m between √½ and √2, and log m is the series
   2 (s + s³/3 + s⁵/5 + …) with s = (m - 1) / (m + 1), which is at most 0.172. Infinity and a NaN stay what they are. */
static inline double logarithm(double x) {
    const int64_t root = 0x3fe6a09e667f3bcd; /* the bits of √½ */
    if (!(x < __builtin_inf())) return x;
    if (x == 0) return -__builtin_inf();
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t exponent = (bits - root) >> 52;
    bits -= exponent << 52;
    double m, series = 0;
    memcpy(&m, &bits, sizeof m);
    double s = (m - 1) / (m + 1), square = s * s;
    for (int k = 21; k > 0; k -= 2) series = series * square + 1.0 / k;
    return 2 * s * series + (double)exponent * 0.693147180559945309;
}
