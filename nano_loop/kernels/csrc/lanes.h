/* fp32 vectors for any CPU, by the vector extensions of GCC and clang. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Values per vector: one register. Wider vectors would be in memory. */
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
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t divided(int64_t number, int64_t by) { return (number + by - 1) / by; }
INLINE int64_t up_to(int64_t number, int64_t multiple) { return divided(number, multiple) * multiple; }

/* Evaluates CALL, in which NAME is a constant with the value of a flag: inline functions are compiled for both values. */
#define SPECIALIZED(NAME, FLAG, CALL)                                                                                  \
    do {                                                                                                               \
        if (FLAG) {                                                                                                    \
            const int NAME = 1;                                                                                        \
            CALL;                                                                                                      \
        } else {                                                                                                       \
            const int NAME = 0;                                                                                        \
            CALL;                                                                                                      \
        }                                                                                                              \
    } while (0)

/* Selects the bits of `yes` where a comparison is true, and of `no` elsewhere. */
#define CHOOSE(CONDITION, YES, NO)                                                                                     \
    ({                                                                                                                 \
        Words mask = (Words)(CONDITION);                                                                               \
        (Vector)((mask & (Words)(YES)) | (~mask & (Words)(NO)));                                                       \
    })
