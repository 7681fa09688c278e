/* AMX tiles: whether they are available, and their shapes.

   gcc's intrinsics are not declared to access memory. Functions that use them begin and end with MEMORY_CHANGES. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HAS_AMX
#define WITH_TILES __attribute__((target("amx-tile,amx-bf16")))
#define MEMORY_CHANGES __asm__ volatile("" ::: "memory")

/* Whether the CPU has AMX tiles, and Linux lets this process use them. */
static int find_amx(void) {
    unsigned eax, ebx, ecx, edx, low, high;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & 1u << 22) || !(edx & 1u << 24)) return 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & 1u << 27)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    /* ARCH_REQ_XCOMP_PERM, for the tile data; 3 << 17: both state components. */
    return (low & 3u << 17) == 3u << 17 && !syscall(SYS_arch_prctl, 0x1023, 18);
}

/* Configures the eight tiles with these numbers of lines and of words, and zeroes them. */
WITH_TILES static void begin_tiles(const uint8_t *lines, const uint8_t *words) {
    struct {
        uint8_t palette, start, nothing[14];
        uint16_t bytes[16];
        uint8_t lines[16];
    } config = {1, 0, {0}, {0}, {0}};
    for (int i = 0; i < 8; i++) config.bytes[i] = 4 * words[i], config.lines[i] = lines[i];
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

WITH_TILES static void end_tiles(void) { _tile_release(); }

/* Initializes tiles 0 to 3, which hold 32 × 32 sums: zeros, or `sums`, with the other halves at `right` and `below`. */
WITH_TILES static inline void begin_sums(int begins, const float *sums, int64_t right, int64_t below, int64_t row) {
    MEMORY_CHANGES;
    if (begins) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 4 * row);
        _tile_loadd(1, sums + right, 4 * row);
        _tile_loadd(2, sums + below, 4 * row);
        _tile_loadd(3, sums + below + right, 4 * row);
    }
}

/* Adds the products of 32 rows of A and 32 columns of B: two tiles each, with these strides between lines in bytes. If B
   `streams`, its loads are hinted not to replace A in the L1 cache. */
WITH_TILES static inline void add_to_sums(const int streams, const void *a, const void *a_below, int64_t a_line,
                                          const void *b, const void *b_right, int64_t b_line) {
    if (streams) {
        _tile_stream_loadd(6, b, b_line);
        _tile_stream_loadd(7, b_right, b_line);
    } else {
        _tile_loadd(6, b, b_line);
        _tile_loadd(7, b_right, b_line);
    }
    _tile_loadd(4, a, a_line);
    _tile_loadd(5, a_below, a_line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

WITH_TILES static inline void store_sums(float *sums, int64_t right, int64_t below, int64_t row) {
    _tile_stored(0, sums, 4 * row);
    _tile_stored(1, sums + right, 4 * row);
    _tile_stored(2, sums + below, 4 * row);
    _tile_stored(3, sums + below + right, 4 * row);
    MEMORY_CHANGES;
}
#else
static int find_amx(void) { return 0; }
#endif
