/* Vectors of fp32 numbers, for any CPU. They are GCC's and clang's own. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Numbers of a vector: those of a register. Wider vectors would lie in memory. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The bits of `yes` where those of a comparison are set, and else of `no`. */
#define CHOOSE(CONDITION, YES, NO)                                                                                     \
    ({                                                                                                                 \
        Words mask = (Words)(CONDITION);                                                                               \
        (Vector)((mask & (Words)(YES)) | (~mask & (Words)(NO)));                                                       \
    })
