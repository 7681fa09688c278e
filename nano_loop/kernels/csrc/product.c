/* Matrix products by the bf16 instructions of AVX-512, or by AMX (amx_product.h): A B, or A B plus a row, with each
   factor optionally transposed, for one pair or a batch. Factors are in bf16, or in fp32, which is rounded to bf16
   while packing.

   B is packed in tiles of 64 columns, whose panels stay in the L2 cache while all rows of A pass. A is read in place if
   its rows are contiguous; of an fp32 matrix, a few rows are rounded at a time. If A is transposed, as in a weight
   gradient, all of B is packed once for all threads, and A in chunks of rows. The next data is prefetched meanwhile.
   Sums are in fp32. Each element is computed by one thread, in an order independent of the number of threads. */
#include <stdint.h>
#include <string.h>

#include "avx512_bf16.h"

/* Strides are in elements: of A by row and depth, of B by depth and column. One of each is 1. */
typedef struct {
    int64_t rows, columns, depth;
    int64_t a[2], b[2], out_row;
    int64_t batch, of_batch[3];                         /* number of products, and strides between them: A, B, result */
    int64_t a_is_wide, b_is_wide, bias_is_wide, is_wide; /* whether A, B, the bias and the result are fp32 */
    int64_t by_tiles;                                    /* whether to use AMX tiles */
} Call;

#ifdef HAS_AVX512_BF16
#include "amx_product.h"
#include "packing.h"

#define ROWS 6             /* of a tile of sums, each with one broadcast */
#define CHUNK 48           /* rows of A that are packed at a time: 8 tiles; 3 cache lines of words, an odd number */
#define PANEL 2048         /* maximum pairs of an undivided panel */
#define PAIRS 320          /* pairs per panel of a divided depth, if A is read in place */
#define PACKED_PAIRS 1024  /* likewise, if A is packed */
#define WORDS (1 << 17)    /* of the panels of a block: half of an L2 cache of 1 MB */
#define STEP 8             /* pairs between two prefetch steps */

/* The partition of the work among threads and into blocks. */
typedef struct {
    int64_t row_parts, column_parts;       /* number of parts, divided among the threads */
    int64_t rows_of_part, tiles_of_part;   /* `tiles` are tiles of columns */
    int64_t pairs, blocks, pairs_of_block; /* of the depth */
    int64_t tiles, tiles_of_chunk;         /* of columns */
    int64_t packs_a;
    int64_t shared, own, sums;             /* bytes: packed for all threads, packed per thread, and its sums */
    int64_t rounded, rounded_row;          /* bytes: rounded rows of A per thread (part of `own`), and of one row */
} Plan;

/* Partitions rows and columns among `threads` threads to minimize the cycles of the slowest. */
static void divide(const Call *call, Plan *plan, int64_t threads) {
    double fewest = 0;
    int64_t unit = plan->packs_a ? CHUNK : ROWS, units = divided(call->rows, unit);
    for (int64_t columns = 1; columns <= (plan->packs_a ? 1 : least(threads, plan->tiles)); columns++) {
        int64_t rows = least(threads / columns, units);
        /* In units of a tile of sums: reading and packing the columns of a tile costs about three, and reading its rows
           costs a quarter. */
        double tiles = (double)divided(plan->tiles, columns), of_rows = (double)(divided(units, rows) * unit / ROWS);
        double found = tiles * (of_rows + 3) + of_rows / 4;
        if (columns > 1 && found >= fewest) continue;
        fewest = found, plan->column_parts = columns, plan->row_parts = rows;
    }
    plan->rows_of_part = divided(units, plan->row_parts) * unit;
    plan->tiles_of_part = divided(plan->tiles, plan->column_parts);
}

static Plan plan_of(const Call *call, int64_t threads) {
    Plan plan;
    plan.packs_a = call->a[1] != 1;
    plan.pairs = divided(call->depth, 2);
    plan.tiles = divided(call->columns, TILE);
    divide(call, &plan, threads);
    int64_t most_pairs = plan.packs_a ? PACKED_PAIRS : plan.pairs <= PANEL ? PANEL : PAIRS;
    plan.blocks = divided(plan.pairs, most_pairs);
    plan.pairs_of_block = divided(plan.pairs, plan.blocks);
    plan.blocks = divided(plan.pairs, plan.pairs_of_block);
    plan.rounded = plan.rounded_row = 0;
    if (plan.packs_a) {
        plan.tiles_of_chunk = plan.tiles;
        plan.shared = 4 * plan.tiles * TILE * plan.pairs;
        plan.own = 4 * CHUNK * plan.pairs_of_block;
        plan.sums = plan.blocks > 1 ? 4 * CHUNK * plan.tiles * TILE : 0;
        return plan;
    }
    plan.tiles_of_chunk = least(plan.tiles_of_part, most(1, WORDS / (plan.pairs_of_block * TILE)));
    int64_t chunks = divided(plan.tiles_of_part, plan.tiles_of_chunk);
    plan.tiles_of_chunk = divided(plan.tiles_of_part, chunks);
    plan.shared = 0;
    if (call->a_is_wide) { /* one extra cache line, so that rows do not map to the same set */
        plan.rounded_row = up_to(4 * plan.pairs_of_block, 64) + 64;
        plan.rounded = ROWS * plan.rounded_row;
    }
    plan.own = 4 * plan.tiles_of_chunk * TILE * plan.pairs_of_block + plan.rounded;
    plan.sums = plan.blocks > 1 ? 4 * up_to(plan.rows_of_part, ROWS) * plan.tiles_of_chunk * TILE : 0;
    return plan;
}

static int64_t bytes_of(const Plan *plan) {
    return plan->shared + plan->row_parts * plan->column_parts * (plan->own + plan->sums);
}

/* Whether each thread computes whole products. */
static int is_by_batch(const Call *call, int threads) {
    return call->batch >= 4 * threads || (call->batch > 1 && call->batch % threads == 0);
}

/* Whether `by_tiles` is supported. */
int has_amx(void) { return find_amx(); }

/* The number of bytes that a call needs, for all threads. */
int64_t product_bytes(const Call *call, int threads) {
    int by_batch = is_by_batch(call, threads);
    if (call->by_tiles) {
        Tiling tiling = tiling_of(call, by_batch ? 1 : threads);
        return (by_batch ? threads : 1) * bytes_of_tiling(&tiling);
    }
    Plan plan = plan_of(call, by_batch ? 1 : threads);
    return (by_batch ? threads : 1) * bytes_of(&plan);
}

/* ----------------------------------------------------------------------------------------------- fetching */

/* Cache lines to prefetch, a few in each tile: groups of lines with a stride of `within` bytes, and a stride of
   `between` bytes between groups. */
typedef struct {
    const char *base;
    int64_t within, between, shift, mask;
    int64_t at, step; /* in lines, scaled by 2^20 */
    int64_t count;    /* lines per step */
} Ahead;

/* Spreads the lines to prefetch over `steps` steps. */
static Ahead ahead_of(const void *base, int64_t shift, int64_t within, int64_t between, int64_t groups, int64_t steps) {
    Ahead ahead = {base, within, between, shift, ((int64_t)1 << shift) - 1, 0, 0, 0};
    if (steps) {
        ahead.count = divided(groups << shift, steps);
        ahead.step = (groups << shift << 20) / (steps * ahead.count);
    }
    return ahead;
}

INLINE void fetch(Ahead *ahead) {
    for (int64_t i = 0; i < ahead->count; i++, ahead->at += ahead->step) {
        int64_t line = ahead->at >> 20;
        _mm_prefetch(ahead->base + (line & ahead->mask) * ahead->within + (line >> ahead->shift) * ahead->between,
                     _MM_HINT_T0);
    }
}

/* ------------------------------------------------------------------------------------------------ products */

/* A tile of sums: its initial values and its destination. */
typedef struct {
    float *sums;          /* CHUNK or ROWS rows of TILE floats, if the depth is divided */
    int64_t begins, ends; /* whether this is the first and the last part of the depth */
    const void *bias; /* of the tile's columns, or NULL */
    char *out;
    int64_t out_row, columns;
    int64_t is_wide, bias_is_wide;
} Target;

INLINE void store(const int rows, __m512 sums[ROWS][4], const Target *to) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __mmask16 here = first(to->columns - 16 * j);
        __m512 added = _mm512_setzero_ps();
        if (to->bias && to->bias_is_wide) {
            added = _mm512_maskz_loadu_ps(here, element(1, to->bias, 16 * j));
        } else if (to->bias) {
            __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, element(0, to->bias, 16 * j)));
            added = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m512 found = _mm512_add_ps(sums[i][j], added);
            if (to->is_wide) {
                _mm512_mask_storeu_ps(to->out + 4 * (i * to->out_row + 16 * j), here, found);
                continue;
            }
            _mm256_mask_storeu_epi16(to->out + 2 * (i * to->out_row + 16 * j), here, (__m256i)_mm512_cvtneps_pbh(found));
        }
    }
}

/* Adds the products of one pair along the depth, or of the last value if the depth is odd. Prefetching is not done in
   the loop around it: the compiler would run out of registers for addresses and move some to vector registers. */
INLINE void add_pair(const int rows, const int alone, const char *a, int64_t a_row, const uint32_t *b,
                     __m512 sums[ROWS][4]) {
    __m512bh columns[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) columns[j] = (__m512bh)_mm512_loadu_si512(b + 16 * j);
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        int pair = 0;
        memcpy(&pair, a + i * a_row, alone ? sizeof(uint16_t) : sizeof pair);
        __m512bh of_row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], of_row, columns[j]);
    }
}

/* `a_row` and `a_pair` are the strides of rows and pairs in bytes. */
INLINE void add_products(const int rows, int64_t pairs, int odd, const char *a, int64_t a_row, int64_t a_pair,
                         const uint32_t *b, const Target *to, Ahead *of_a, Ahead *of_b) {
    __m512 sums[ROWS][4];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            sums[i][j] = to->begins ? _mm512_setzero_ps() : _mm512_loadu_ps(to->sums + i * TILE + 16 * j);
    int64_t k = 0;
    for (; k + STEP <= pairs - odd; k += STEP) {
        fetch(of_a);
        fetch(of_b);
#pragma GCC unroll 1
        for (int i = 0; i < STEP; i++, a += a_pair, b += TILE) add_pair(rows, 0, a, a_row, b, sums);
    }
    for (; k < pairs - odd; k++, a += a_pair, b += TILE) add_pair(rows, 0, a, a_row, b, sums);
    if (odd) add_pair(rows, 1, a, a_row, b, sums);
    if (to->ends) {
        store(rows, sums, to);
        return;
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(to->sums + i * TILE + 16 * j, sums[i][j]);
}

static void add_tile(int64_t rows, int64_t pairs, int odd, const char *a, int64_t a_row, int64_t a_pair,
                     const uint32_t *b, const Target *to, Ahead *of_a, Ahead *of_b) {
    switch (rows) {
        case 1: add_products(1, pairs, odd, a, a_row, a_pair, b, to, of_a, of_b); break;
        case 2: add_products(2, pairs, odd, a, a_row, a_pair, b, to, of_a, of_b); break;
        case 3: add_products(3, pairs, odd, a, a_row, a_pair, b, to, of_a, of_b); break;
        case 4: add_products(4, pairs, odd, a, a_row, a_pair, b, to, of_a, of_b); break;
        case 5: add_products(5, pairs, odd, a, a_row, a_pair, b, to, of_a, of_b); break;
        default: add_products(6, pairs, odd, a, a_row, a_pair, b, to, of_a, of_b);
    }
}

/* -------------------------------------------------------------------------------------------------- blocks */

/* A call and its tensors. */
typedef struct {
    const Call *call;
    const Plan *plan;
    const void *a, *b, *bias;
    char *out;
} Work;

/* The address of an element of A. */
INLINE const void *place_in_a(const Work *work, int64_t row, int64_t at) {
    const Call *call = work->call;
    return element(call->a_is_wide != 0, work->a, row * call->a[0] + at * call->a[1]);
}

static Target target_of(const Work *work, float *sums, int64_t row, int64_t tile, int64_t block) {
    const Call *call = work->call;
    Target to = {sums, block == 0, block + 1 == work->plan->blocks, 0, 0, call->out_row, call->columns - tile * TILE,
                 call->is_wide, call->bias_is_wide};
    to.bias = work->bias ? element(call->bias_is_wide != 0, work->bias, tile * TILE) : 0;
    to.out = work->out + (call->is_wide ? 4 : 2) * (row * call->out_row + tile * TILE);
    return to;
}

/* Packs some tiles of columns for a part of the depth. */
static void pack_b(const Work *work, int64_t tile, int64_t tiles, int64_t from, int64_t depth, uint32_t *to) {
    const Call *call = work->call;
    const void *b = element(call->b_is_wide != 0, work->b, from * call->b[0] + tile * TILE * call->b[1]);
    int64_t columns = least(tiles * TILE, call->columns - tile * TILE);
    if (call->b[1] == 1) SPECIALIZED(wide, call->b_is_wide, pack_pairs_of(wide, b, call->b[0], depth, columns, to));
    else SPECIALIZED(wide, call->b_is_wide, pack_transposed_of(wide, b, call->b[1], columns, depth, to));
}

/* Packs some contiguous rows of A for a part of the depth: CHUNK words for each pair. */
INLINE void pack_a(const int wide, const Work *work, int64_t row, int64_t rows, int64_t from, int64_t depth,
                   uint32_t *to) {
    for (int64_t k = 0; k < depth; k += 2, to += CHUNK) {
        const void *low = place_in_a(work, row, from + k), *high = k + 1 < depth ? place_in_a(work, row, from + k + 1) : 0;
        interleave_of(wide, low, high, first_of_32(rows), to);
        __m512i words[2];
        interleave_of(wide, element(wide, low, 32), high ? element(wide, high, 32) : 0, first_of_32(least(rows, CHUNK) - 32),
                      (uint32_t *)words);
        _mm512_storeu_si512(to + 32, words[0]);
    }
}

/* Rounds fp32 rows of A for a part of the depth. */
static void round_rows(const Work *work, int64_t row, int64_t rows, int64_t from, int64_t depth, char *to) {
    for (int64_t i = 0; i < rows; i++, to += work->plan->rounded_row) {
        const void *numbers = place_in_a(work, row + i, from);
        for (int64_t k = 0; k < depth; k += 32)
            _mm512_storeu_si512(to + 2 * k, loaded(1, first_of_32(depth - k), element(1, numbers, k)));
    }
}

/* Prefetches the rows of A for the next tile of sums, and the next panels of B. */
static Ahead ahead_of_rows(const Work *work, int64_t row, int64_t from, int64_t depth, int64_t steps) {
    const Call *call = work->call;
    int64_t size = call->a_is_wide ? 4 : 2;
    if (row + ROWS >= call->rows) return ahead_of(work->a, 0, 0, 0, 1, 0);
    return ahead_of(place_in_a(work, row + ROWS, from), 3, size * call->a[0], 64, divided(size * depth, 64), steps);
}

/* Of the panels packed next: the next part of the depth of these tiles, or the first part of the next tiles. */
static Ahead ahead_of_panels(const Work *work, int64_t tile, int64_t tiles, int64_t block, int64_t steps) {
    const Call *call = work->call;
    int64_t part = 2 * work->plan->pairs_of_block, from = (block + 1) * part;
    if (block + 1 == work->plan->blocks) tile += tiles, from = 0;
    if (tile >= work->plan->tiles) return ahead_of(work->b, 0, 0, 0, 1, 0);
    int64_t depth = least(part, call->depth - from);
    int64_t size = call->b_is_wide ? 4 : 2, lines = tiles * size / 2; /* per row: half of them, at most four */
    const void *b = element(call->b_is_wide != 0, work->b, from * call->b[0] + tile * TILE * call->b[1]);
    if (call->b[1] != 1) return ahead_of(b, 6, size * call->b[1], 64, divided(size * depth, 64), steps);
    return ahead_of(b, lines > 2 ? 2 : lines > 1 ? 1 : 0, 64, size * call->b[0], depth, steps);
}

/* Computes some rows of some tiles of columns. */
static void compute(const Work *work, int64_t row, int64_t rows, int64_t tile, int64_t tiles, char *own) {
    const Call *call = work->call;
    const Plan *plan = work->plan;
    uint32_t *packed = (uint32_t *)own;
    char *rounded = own + plan->own - plan->rounded;
    float *sums = (float *)(own + plan->own);
    for (int64_t block = 0; block < plan->blocks; block++) {
        int64_t from = 2 * block * plan->pairs_of_block, depth = least(call->depth - from, 2 * plan->pairs_of_block);
        int64_t pairs = divided(depth, 2), steps = divided(rows, ROWS) * tiles * (pairs / STEP);
        pack_b(work, tile, tiles, from, depth, packed);
        Ahead of_b = ahead_of_panels(work, tile, tiles, block, steps);
        for (int64_t i = 0; i < rows; i += ROWS) {
            Ahead of_a = ahead_of_rows(work, row + i, from, depth, tiles * (pairs / STEP));
            const char *a = place_in_a(work, row + i, from);
            int64_t a_row = 2 * call->a[0];
            if (call->a_is_wide) {
                round_rows(work, row + i, least(ROWS, rows - i), from, depth, rounded);
                a = rounded, a_row = plan->rounded_row;
            }
            for (int64_t t = 0; t < tiles; t++) {
                Target to = target_of(work, sums + (i * tiles + t * ROWS) * TILE, row + i, tile + t, block);
                add_tile(least(ROWS, rows - i), pairs, (int)(depth % 2), a, a_row, 4, packed + t * pairs * TILE,
                         &to, &of_a, &of_b);
            }
        }
    }
}

/* Computes a chunk of rows of a transposed A, from the packed B. */
static void compute_packed(const Work *work, int64_t row, int64_t rows, const uint32_t *b, char *own) {
    const Plan *plan = work->plan;
    uint32_t *packed = (uint32_t *)own;
    float *sums = (float *)(own + plan->own);
    for (int64_t block = 0; block < plan->blocks; block++) {
        int64_t from = 2 * block * plan->pairs_of_block, depth = least(work->call->depth - from, 2 * plan->pairs_of_block);
        int64_t pairs = divided(depth, 2), next = row + rows;
        SPECIALIZED(wide, work->call->a_is_wide, pack_a(wide, work, row, rows, from, depth, packed));
        Ahead of_a = ahead_of(work->a, 0, 0, 0, 1, 0), of_b = of_a;
        if (next < work->call->rows)
            of_a = ahead_of(place_in_a(work, next, from), 1, 64, (work->call->a_is_wide ? 4 : 2) * work->call->a[1], depth,
                            divided(rows, ROWS) * plan->tiles * (pairs / STEP));
        for (int64_t t = 0; t < plan->tiles; t++)
            for (int64_t i = 0; i < rows; i += ROWS) {
                Target to = target_of(work, sums + (t * CHUNK + i) * TILE, row + i, t, block);
                add_tile(least(ROWS, rows - i), pairs, (int)(depth % 2), (const char *)(packed + i), 4, 4 * CHUNK,
                         b + (block * plan->pairs_of_block * plan->tiles + t * pairs) * TILE, &to, &of_a, &of_b);
            }
    }
}

/* Packs this thread's part of B for chunks of a transposed A. */
static void pack_all(const Work *work, int64_t thread, int64_t threads, char *scratch) {
    const Plan *plan = work->plan;
    for (int64_t unit = thread; unit < plan->blocks * plan->tiles; unit += threads) {
        int64_t from = 2 * (unit / plan->tiles) * plan->pairs_of_block, tile = unit % plan->tiles;
        int64_t depth = least(work->call->depth - from, 2 * plan->pairs_of_block);
        pack_b(work, tile, 1, from, depth, (uint32_t *)scratch + (from / 2 * plan->tiles + tile * divided(depth, 2)) * TILE);
    }
}

/* Computes one of the parts of the result. */
static void compute_part(const Work *work, int64_t part, char *scratch) {
    const Plan *plan = work->plan;
    char *own = scratch + plan->shared + part * (plan->own + plan->sums);
    int64_t row = part % plan->row_parts * plan->rows_of_part, end = least(work->call->rows, row + plan->rows_of_part);
    int64_t tile = part / plan->row_parts * plan->tiles_of_part, last = least(plan->tiles, tile + plan->tiles_of_part);
    if (plan->packs_a) {
        for (; row < end; row += CHUNK)
            compute_packed(work, row, least(CHUNK, end - row), (const uint32_t *)scratch, own);
    } else if (row < end) {
        for (; tile < last; tile += plan->tiles_of_chunk)
            compute(work, row, end - row, tile, least(plan->tiles_of_chunk, last - tile), own);
    }
}

/* One of the products of a call. */
static Work work_of(const Call *call, const Plan *plan, const void *a, const void *b, const void *bias, char *out,
                    int64_t at) {
    Work work = {call, plan, 0, 0, bias, out + (call->is_wide ? 4 : 2) * at * call->of_batch[2]};
    work.a = element(call->a_is_wide != 0, a, at * call->of_batch[0]);
    work.b = element(call->b_is_wide != 0, b, at * call->of_batch[1]);
    return work;
}

/* Writes A B, plus `bias` if it is not NULL, in bf16 or fp32, for each product of the batch. Rows of `out` are
   contiguous. OpenMP may provide fewer threads than requested: each then computes several parts. */
void product(const Call *call, const void *a, const void *b, const void *bias, char *out, char *scratch, int threads) {
    if (is_by_batch(call, threads)) {
        Plan plan = plan_of(call, 1);
        Tiling tiling = tiling_of(call, 1);
        int64_t bytes = product_bytes(call, threads) / threads;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < call->batch; i++) {
            char *own = scratch + omp_get_thread_num() * bytes;
            Work work = work_of(call, &plan, a, b, bias, out, i);
            if (call->by_tiles) {
                multiply_by_tiles(call, &tiling, work.a, work.b, bias, work.out, own, 0);
                continue;
            }
            if (plan.packs_a) pack_all(&work, 0, 1, own);
            compute_part(&work, 0, own);
        }
        return;
    }
    Plan plan = plan_of(call, threads);
    Tiling tiling = tiling_of(call, threads);
    int64_t parts = call->by_tiles ? tiling.row_parts * tiling.column_parts : plan.row_parts * plan.column_parts;
#pragma omp parallel num_threads((int)parts)
    {
        int64_t thread = omp_get_thread_num(), given = omp_get_num_threads();
        for (int64_t i = 0; i < call->batch; i++) {
            Work work = work_of(call, &plan, a, b, bias, out, i);
            if (call->by_tiles) {
                for (int64_t part = thread; part < parts; part += given)
                    multiply_by_tiles(call, &tiling, work.a, work.b, bias, work.out, scratch, part);
                continue;
            }
            if (plan.packs_a) pack_all(&work, thread, given, scratch);
#pragma omp barrier
            for (int64_t part = thread; part < parts; part += given) compute_part(&work, part, scratch);
#pragma omp barrier
        }
    }
}
#endif
