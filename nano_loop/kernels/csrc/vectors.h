/* Functions of AVX-512 vectors of 16 fp32 values. */
#pragma once
#include <immintrin.h>

#include "packing.h"

/* exp(x) for -87 <= x <= 87, as in Cephes' expf. NaN is preserved. */
INLINE __m512 exponential_within(__m512 x) {
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* exp(x) for x that is not much larger than 0. Below -87 it is 0. */
INLINE __m512 exponential(__m512 x) {
    const __m512 lowest = _mm512_set1_ps(-87.0f);
    __mmask16 is_zero = _mm512_cmp_ps_mask(x, lowest, _CMP_LT_OQ);
    return _mm512_mask_mov_ps(exponential_within(_mm512_max_ps(lowest, x)), is_zero, _mm512_setzero_ps());
}
