/* Denormal numbers, which lie between 0 and 2^-126. With them, many CPUs compute ten times as long or more. Gradients that
   vanish over many layers or steps become denormal; a backward takes them for 0. A forward keeps what is that small. */
#pragma once
#ifdef __SSE2__
#include <xmmintrin.h>
#endif
#define FLUSHED_TO_ZERO 0x8000 /* results of this thread */

/* Lets results of this thread that are denormal be 0, if it is `wanted`. Returns the state before, for `restore`. */
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
