/* Denormal numbers, between 0 and 2^-126, slow many CPUs down by a factor of ten or more. Gradients that vanish over
   many layers or steps become denormal; a backward flushes them to 0. A forward preserves them. */
#pragma once
#ifdef __SSE2__
#include <xmmintrin.h>
#endif
#define FLUSHED_TO_ZERO 0x8000 /* results of this thread */

/* Flushes denormal results of this thread to 0 if `wanted`. Returns the previous state, for `restore`. */
static inline unsigned flush_denormals(int wanted) {
#ifdef __SSE2__
    unsigned state = _mm_getcsr();
    if (wanted) _mm_setcsr(state | FLUSHED_TO_ZERO);
    return state;
#else
    return (unsigned)wanted;
#endif
}

static inline void restore(unsigned state) {
#ifdef __SSE2__
    _mm_setcsr(state);
#endif
}
