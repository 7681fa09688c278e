/* Whether kernels for the bf16 instructions of AVX-512 are compiled, and torch's threads, which run them. */
#pragma once
#include "threads.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512BF16__)
#define HAS_AVX512_BF16
int is_supported(void) { return 1; }
#else
int is_supported(void) { return 0; }
#endif
