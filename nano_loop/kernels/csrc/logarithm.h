/* The natural logarithm. Using the one of the C library would require glibc 2.29 or later, which versioned the symbol.
   */
#pragma once
#include <stdint.h>
#include <string.h>

/* For 0 and values >= 1, to within 1e-15 of the result. x = m 2^e with m between √½ and √2, and log m is the series 2
   (s + s³/3 + s⁵/5 + …) with s = (m - 1) / (m + 1), which is at most 0.172. Infinity and NaN are preserved. */
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
