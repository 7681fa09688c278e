/* AMX tiles in plain C, so that kernels with AMX are tested on CPUs without it: test_csrc.py includes this header before
   each file of csrc. It replaces the instructions that amx.h and tiles.h use, as Intel's manual describes them. What a
   CPU would refuse, such as a product of tiles whose shapes do not match, ends the process. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The definition `find_amx(void)` of amx.h gets another name, and its calls `find_amx()` become 1. */
#define find_amx(argument) EMULATED_FIND_AMX_##argument
#define EMULATED_FIND_AMX_void find_amx_of_cpu(void)
#define EMULATED_FIND_AMX_ 1

#define MOST_LINES 16
#define LINE 64 /* maximum bytes of a line */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
} EmulatedConfig;

typedef struct {
    int lines, bytes; /* zero: not configured */
    uint32_t words[MOST_LINES][LINE / 4];
} EmulatedTile;

static __thread EmulatedTile emulated_tiles[8];

static inline void emulated_check(int is_valid) {
    if (!is_valid) abort();
}

static inline EmulatedTile *emulated_tile(int number) {
    emulated_check(number >= 0 && number < 8 && emulated_tiles[number].lines > 0 && emulated_tiles[number].bytes > 0);
    return &emulated_tiles[number];
}

static inline void emulated_loadconfig(const void *from) {
    EmulatedConfig config;
    memcpy(&config, from, sizeof config);
    emulated_check(config.palette == 1 && config.start == 0);
    for (int i = 0; i < 14; i++) emulated_check(config.reserved[i] == 0);
    memset(emulated_tiles, 0, sizeof emulated_tiles);
    for (int i = 0; i < 16; i++) {
        emulated_check(config.lines[i] <= MOST_LINES && config.bytes[i] <= LINE && !config.lines[i] == !config.bytes[i]);
        emulated_check(i < 8 || config.lines[i] == 0);
        if (i < 8) emulated_tiles[i].lines = config.lines[i], emulated_tiles[i].bytes = config.bytes[i];
    }
}

static inline void emulated_release(void) { memset(emulated_tiles, 0, sizeof emulated_tiles); }

static inline void emulated_zero(int number) {
    EmulatedTile *tile = emulated_tile(number);
    memset(tile->words, 0, sizeof tile->words);
}

static inline void emulated_load(int number, const void *from, int64_t stride) {
    EmulatedTile *tile = emulated_tile(number);
    memset(tile->words, 0, sizeof tile->words);
    for (int i = 0; i < tile->lines; i++) memcpy(tile->words[i], (const char *)from + i * stride, (size_t)tile->bytes);
}

static inline void emulated_store(int number, void *to, int64_t stride) {
    const EmulatedTile *tile = emulated_tile(number);
    for (int i = 0; i < tile->lines; i++) memcpy((char *)to + i * stride, tile->words[i], (size_t)tile->bytes);
}

/* A value as these instructions read and write it: denormal numbers are 0. */
static inline float emulated_float(uint32_t bits) {
    float value;
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t emulated_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7f800000u ? bits : bits & 0x80000000u;
}

/* Adds the products of rows of A and columns of B, which has pairs of bf16 values in its words. First values and second
   values of the pairs have sums of their own. */
static inline void emulated_dpbf16ps(int sums, int a, int b) {
    EmulatedTile *to = emulated_tile(sums);
    const EmulatedTile *rows = emulated_tile(a), *columns = emulated_tile(b);
    emulated_check(to->lines == rows->lines && to->bytes == columns->bytes && rows->bytes == 4 * columns->lines);
    emulated_check(sums != a && sums != b && a != b);
    for (int i = 0; i < to->lines; i++) {
        float firsts[LINE / 4] = {0}, seconds[LINE / 4] = {0};
        for (int k = 0; k < columns->lines; k++) {
            float first = emulated_float(rows->words[i][k] << 16), second = emulated_float(rows->words[i][k] & 0xffff0000u);
            for (int j = 0; j < LINE / 4; j++) {
                firsts[j] += first * emulated_float(columns->words[k][j] << 16);
                seconds[j] += second * emulated_float(columns->words[k][j] & 0xffff0000u);
            }
        }
        for (int j = 0; j < to->bytes / 4; j++)
            to->words[i][j] = emulated_bits(emulated_float(to->words[i][j]) + (firsts[j] + seconds[j]));
    }
}

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated_loadconfig(from)
#define _tile_release() emulated_release()
#define _tile_zero(number) emulated_zero(number)
#define _tile_loadd(number, from, stride) emulated_load(number, from, stride)
#define _tile_stream_loadd(number, from, stride) emulated_load(number, from, stride)
#define _tile_stored(number, to, stride) emulated_store(number, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated_dpbf16ps(sums, a, b)
