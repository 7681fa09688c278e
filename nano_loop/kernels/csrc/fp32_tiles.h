/* Sums of products of a few rows with the columns of a tile, for any CPU. Intrinsics are only used to load and store
   partial vectors. */
#pragma once
#include "transpose.h"

/* Rows whose sums are computed at a time: together with the vectors of a tile, they fill the registers. */
#define ROWS (WIDTH == 8 ? 3 : 6)
#define VECTORS 4 /* maximum number per tile */
#define TILE (VECTORS * WIDTH)
#define CHUNK 20 /* maximum products summed sequentially: sums of partial sums have smaller errors */
#define MULTIPLICATIONS (1 << 19) /* per additional thread */

typedef float Unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* Loads up to `count` values of a vector. The others are 0. */
INLINE Vector load(const float *from, int64_t count) {
    if (count >= WIDTH) return *(const Unaligned *)from;
#if defined(__AVX512F__)
    return (Vector)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#elif defined(__AVX2__)
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (Vector)_mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), places));
#else
    Vector numbers = {0};
    for (int64_t i = 0; i < count; i++) numbers[i] = from[i];
    return numbers;
#endif
}

INLINE void store(float *to, int64_t count, Vector numbers) {
    if (count >= WIDTH) {
        *(Unaligned *)to = numbers;
        return;
    }
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)numbers);
#else
    for (int64_t i = 0; i < count; i++) to[i] = numbers[i];
#endif
}

/* Sums of products of `rows` rows with the columns of a tile that has `vectors` vectors for each depth index. `a_step`
   and `tile_step` are the strides along the depth. */
INLINE void product_of_tile(const int rows, const int vectors, int64_t depth, const float *const *a, int64_t a_step,
                            const float *tile, int64_t tile_step, float *sums) {
    int64_t chunks = divided(depth, CHUNK), chunk = divided(depth, chunks);
    for (int64_t first = 0; first < depth; first += chunk) {
        Vector totals[ROWS][VECTORS] = {{{0}}};
        int64_t end = least(depth, first + chunk);
        for (int64_t k = first; k < end; k++) {
            Vector columns[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) columns[j] = *(const Unaligned *)(tile + k * tile_step + j * WIDTH);
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++) totals[i][j] += columns[j] * a[i][k * a_step];
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                Unaligned *sum = (Unaligned *)(sums + i * TILE + j * WIDTH);
                if (first) totals[i][j] += *sum;
                *sum = totals[i][j];
            }
    }
}

/* Functions for any number of rows, for tiles with this number of vectors. */
#define OF_VECTORS(PRODUCT, VECTORS)                                                                                   \
    static void PRODUCT##_##VECTORS(int64_t rows, int64_t depth, const float *const *a, int64_t a_step,                \
                                    const float *tile, int64_t tile_step, float *sums) {                               \
        switch (rows) {                                                                                                \
            case 1: PRODUCT(1, VECTORS, depth, a, a_step, tile, tile_step, sums); break;                                      \
            case 2: PRODUCT(2, VECTORS, depth, a, a_step, tile, tile_step, sums); break;                                      \
            case 3: PRODUCT(3, VECTORS, depth, a, a_step, tile, tile_step, sums); break;                                      \
            case 4: PRODUCT(least(4, ROWS), VECTORS, depth, a, a_step, tile, tile_step, sums); break;                         \
            case 5: PRODUCT(least(5, ROWS), VECTORS, depth, a, a_step, tile, tile_step, sums); break;                         \
            default: PRODUCT(ROWS, VECTORS, depth, a, a_step, tile, tile_step, sums);                                  \
        }                                                                                                              \
    }
typedef void Product(int64_t, int64_t, const float *const *, int64_t, const float *, int64_t, float *);
#define FUNCTIONS(NAME, PRODUCT)                                                                                       \
    OF_VECTORS(PRODUCT, 1)                                                                                             \
    OF_VECTORS(PRODUCT, 2)                                                                                             \
    OF_VECTORS(PRODUCT, 3)                                                                                             \
    OF_VECTORS(PRODUCT, 4)                                                                                             \
    static Product *const NAME[] = {PRODUCT##_1, PRODUCT##_2, PRODUCT##_3, PRODUCT##_4};
FUNCTIONS(IN_FP32, product_of_tile)

/* The number of vectors of the tile that starts at a column. */
INLINE int64_t vectors_at(int64_t column, int64_t columns) { return least(VECTORS, divided(columns - column, WIDTH)); }

/* Packs up to a vector of columns of contiguous values: `columns` of them, of depth `depth`. */
INLINE void pack_transposed(const float *b, int64_t b_column, int64_t columns, int64_t depth, int64_t width, float *tile) {
    for (int64_t k = 0; k < depth; k += WIDTH) {
        Vector rows[WIDTH];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) rows[i] = i < columns ? load(b + i * b_column + k, depth - k) : (Vector){0};
        transpose(rows);
        for (int i = 0; i < WIDTH && k + i < depth; i++) *(Vector *)(tile + (k + i) * width) = rows[i];
    }
}

/* Packs a tile of `width` columns, zero-padded if there are fewer. */
static inline void pack_tile(const float *b, int64_t b_step, int64_t b_column, int64_t columns, int64_t depth, int64_t width,
                             float *tile) {
    int64_t count = least(columns, width);
    if (b_column == 1) {
        for (int64_t k = 0; k < depth; k++, b += b_step, tile += width) {
            memcpy(tile, b, 4 * (size_t)count);
            memset(tile + count, 0, 4 * (size_t)(width - count));
        }
    } else if (b_step == 1) {
        for (int64_t i = 0; i < width; i += WIDTH)
            pack_transposed(b + i * b_column, b_column, count - i, depth, width, tile + i);
    } else {
        for (int64_t k = 0; k < depth; k++)
            for (int64_t i = 0; i < width; i++)
                tile[k * width + i] = i < count ? b[k * b_step + i * b_column] : 0.0f;
    }
}
