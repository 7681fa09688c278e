/* The recurrence of a layer of an LSTM and its gradients, by the bf16 instructions of AVX-512.

   The products of many inputs with their weights are computed before, those of all gradients after it, since they depend
   on no step before. In a step, a tile of sums has the four gates of some units, or the states' gradients of some more, so a
   thread computes all else of these units while they are in the cache. Gates and cells are in fp32.

   An element is computed by one thread, in an order that does not depend on their number. */
#include <stdint.h>
#include <string.h>

#include "avx512_bf16.h"

/* Sizes. `inputs` are those that the forward multiplies in each step, an even number, and 0 where that was done before. If
   it is reversed, the last step is computed first. If it is wide, the outputs' gradients have fp32 numbers, and so has
   that of the first outputs. */
typedef struct {
    int64_t steps, batch, inputs, hidden, is_reversed, is_wide;
} Call;

#ifdef HAS_AVX512_BF16
#include "tiles.h"
#include "vectors.h"

#define GATES 4 /* input, forget, cell and output */
#define UNITS 16 /* whose gates are a tile */
#define ROWS 6   /* sequences of a batch whose sums are computed at a time */

/* The depth of the product of a step. */
INLINE int64_t depth_of(const Call *call, int backward) {
    return backward ? GATES * call->hidden : call->inputs + call->hidden;
}

/* Bytes of the packed weights. */
INLINE int64_t packed_bytes(const Call *call, int backward) {
    return 2 * divided(call->hidden, backward ? TILE : UNITS) * TILE * depth_of(call, backward);
}

/* Bytes of memory that a call takes: for the packed weights, and for the bias's gradients by each block of rows. */
int64_t lstm_bytes(const Call *call, int backward) {
    return packed_bytes(call, backward) + (backward ? 4 * divided(call->batch, ROWS) * GATES * call->hidden : 0);
}

/* A call, and its tensors. `states` has for each step and sequence the gates of all units, and then their cells. */
typedef struct {
    const Call *call;
    const uint16_t *inputs, *of_inputs, *weight; /* weights of inputs and of states, in rows of gates */
    const float *bias, *first_cells;
    const uint16_t *first_outputs;
    float *states;
    uint16_t *out;
    float *wide_out;                     /* the same before they are rounded, or NULL */
    const void *of_out, *of_last_output; /* gradients, or NULL */
    uint16_t *of_gates;
    void *of_first_output;
    float *of_cells; /* what the steps that are computed have added to them */
    uint32_t *packed;
    float *of_bias; /* for each block of rows */
} Work;

/* The place of a step in memory, by the order in which the forward computes them. */
INLINE int64_t place(const Call *call, int64_t step) { return call->is_reversed ? call->steps - 1 - step : step; }

INLINE float *state(const Work *work, int64_t step, int64_t row) {
    return work->states + (place(work->call, step) * work->call->batch + row) * (GATES + 1) * work->call->hidden;
}

/* The cells before a step. */
INLINE const float *cells_before(const Work *work, int64_t step, int64_t row) {
    if (step) return state(work, step - 1, row) + GATES * work->call->hidden;
    return work->first_cells + row * work->call->hidden;
}

/* Numbers of a gradient. */
INLINE __m512 widened(const Call *call, __mmask16 here, const void *from, int64_t at) {
    if (call->is_wide) return _mm512_maskz_loadu_ps(here, (const float *)from + at);
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, (const uint16_t *)from + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

INLINE void store_rounded(uint16_t *to, __mmask16 here, __m512 numbers) {
    _mm256_mask_storeu_epi16(to, here, (__m256i)_mm512_cvtneps_pbh(numbers));
}

/* x (1 - x), the slope of a sigmoid by its value. */
INLINE __m512 slope(__m512 x) { return _mm512_fnmadd_ps(x, x, x); }

/* ------------------------------------------------------------------------------------------------- forward */

/* Computes 16 units of a sequence from the sums of their gates. What was computed before of their inputs is in `states`. */
INLINE void compute_units(const Work *work, int64_t step, int64_t row, int64_t unit, const float *sums) {
    int64_t hidden = work->call->hidden, at = (place(work->call, step) * work->call->batch + row) * hidden + unit;
    __mmask16 here = first(hidden - unit);
    float *gates = state(work, step, row) + unit;
    __m512 found[GATES];
#pragma GCC unroll 4
    for (int i = 0; i < GATES; i++) {
        __m512 added = _mm512_maskz_loadu_ps(here, work->bias + i * hidden + unit);
        if (!work->inputs) added = _mm512_add_ps(added, _mm512_maskz_loadu_ps(here, gates + i * hidden));
        found[i] = _mm512_add_ps(_mm512_loadu_ps(sums + UNITS * i), added);
        found[i] = i == 2 ? hyperbolic_tangent(found[i]) : sigmoid(found[i]);
        _mm512_mask_storeu_ps(gates + i * hidden, here, found[i]);
    }
    __m512 cells = _mm512_mul_ps(found[1], _mm512_maskz_loadu_ps(here, cells_before(work, step, row) + unit));
    cells = _mm512_fmadd_ps(found[0], found[2], cells);
    _mm512_mask_storeu_ps(gates + GATES * hidden, here, cells);
    __m512 output = _mm512_mul_ps(found[3], hyperbolic_tangent(cells));
    store_rounded(work->out + at, here, output);
    if (work->wide_out) _mm512_mask_storeu_ps(work->wide_out + at, here, output);
}

static void forward_tile(const Work *work, int64_t step, int64_t tile, int64_t row, int64_t rows) {
    const Call *call = work->call;
    float sums[ROWS * TILE];
    int64_t inputs = call->inputs, hidden = call->hidden, pairs = hidden / 2;
    const uint16_t *before = step ? work->out + place(call, step - 1) * call->batch * hidden : work->first_outputs;
    const uint32_t *packed = work->packed + tile * TILE * depth_of(call, 0) / 2;
    product(rows, TILE, pairs, before + row * hidden, 2 * hidden, 4, packed, pairs, sums, TILE, 0);
    if (inputs) {
        const uint16_t *from = work->inputs + (place(call, step) * call->batch + row) * inputs;
        product(rows, TILE, inputs / 2, from, 2 * inputs, 4, packed + pairs * TILE, inputs / 2, sums, TILE, 1);
    }
    for (int64_t i = 0; i < rows; i++) compute_units(work, step, row + i, tile * UNITS, sums + i * TILE);
}

static void pack_forward(const Work *work, int64_t tile) {
    int64_t inputs = work->call->inputs, hidden = work->call->hidden, unit = tile * UNITS;
    uint32_t *to = work->packed + tile * TILE * depth_of(work->call, 0) / 2;
    for (int64_t i = 0; i < GATES; i++, to += UNITS) {
        int64_t row = i * hidden + unit;
        pack_group(work->weight + row * hidden, hidden, hidden - unit, hidden, to);
        pack_group(work->of_inputs + row * inputs, inputs, hidden - unit, inputs, to + hidden / 2 * TILE);
    }
}

/* ------------------------------------------------------------------------------------------------ backward */

/* Computes the gradients of the gates of 16 units of a sequence, and of their cells before the step, from `of_output`,
   what the steps behind have added to that of the output. */
INLINE void differentiate_units(const Work *work, int64_t step, int64_t row, int64_t unit, __m512 of_output,
                                __m512 of_bias[GATES]) {
    int64_t hidden = work->call->hidden, at = place(work->call, step) * work->call->batch + row;
    __mmask16 here = first(hidden - unit);
    const __m512 one = _mm512_set1_ps(1.0f);
    const float *gates = state(work, step, row) + unit;
    __m512 input = _mm512_maskz_loadu_ps(here, gates), forget = _mm512_maskz_loadu_ps(here, gates + hidden);
    __m512 cell = _mm512_maskz_loadu_ps(here, gates + 2 * hidden), output = _mm512_maskz_loadu_ps(here, gates + 3 * hidden);
    __m512 squashed = hyperbolic_tangent(_mm512_maskz_loadu_ps(here, gates + GATES * hidden));
    __m512 before = _mm512_maskz_loadu_ps(here, cells_before(work, step, row) + unit);
    if (work->of_out) of_output = _mm512_add_ps(of_output, widened(work->call, here, work->of_out, at * hidden + unit));
    float *running = work->of_cells + row * hidden + unit;
    __m512 of_cells = _mm512_mul_ps(_mm512_mul_ps(of_output, output), _mm512_fnmadd_ps(squashed, squashed, one));
    of_cells = _mm512_add_ps(of_cells, _mm512_maskz_loadu_ps(here, running));
    _mm512_mask_storeu_ps(running, here, _mm512_mul_ps(of_cells, forget));
    __m512 found[GATES] = {
        _mm512_mul_ps(_mm512_mul_ps(of_cells, cell), slope(input)),
        _mm512_mul_ps(_mm512_mul_ps(of_cells, before), slope(forget)),
        _mm512_mul_ps(_mm512_mul_ps(of_cells, input), _mm512_fnmadd_ps(cell, cell, one)),
        _mm512_mul_ps(_mm512_mul_ps(of_output, squashed), slope(output)),
    };
#pragma GCC unroll 4
    for (int i = 0; i < GATES; i++) {
        store_rounded(work->of_gates + (at * GATES + i) * hidden + unit, here, found[i]);
        of_bias[i] = _mm512_add_ps(of_bias[i], found[i]);
    }
}

/* The gradients of 16 units of some sequences: of the outputs before `behind`, the step behind, and of the gates of the one
   before it. `sums` are products of rows of a tile, or NULL behind the last step. */
INLINE void compute_gradients(const Work *work, int64_t behind, int64_t row, int64_t rows, int64_t unit, const float *sums) {
    int64_t hidden = work->call->hidden;
    __mmask16 here = first(hidden - unit);
    float *to = work->of_bias + row / ROWS * GATES * hidden + unit;
    __m512 of_bias[GATES];
#pragma GCC unroll 4
    for (int i = 0; i < GATES; i++) of_bias[i] = _mm512_maskz_loadu_ps(here, to + i * hidden);
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = (row + i) * hidden + unit;
        __m512 of_output = _mm512_setzero_ps();
        if (sums) of_output = _mm512_loadu_ps(sums + i * TILE);
        else if (work->of_last_output) of_output = widened(work->call, here, work->of_last_output, at);
        if (behind) differentiate_units(work, behind - 1, row + i, unit, of_output, of_bias);
        else if (work->call->is_wide) _mm512_mask_storeu_ps((float *)work->of_first_output + at, here, of_output);
        else store_rounded((uint16_t *)work->of_first_output + at, here, of_output);
    }
#pragma GCC unroll 4
    for (int i = 0; i < GATES; i++) _mm512_mask_storeu_ps(to + i * hidden, here, of_bias[i]);
}

static void backward_tile(const Work *work, int64_t behind, int64_t tile, int64_t row, int64_t rows) {
    const Call *call = work->call;
    float sums[ROWS * TILE];
    int64_t hidden = call->hidden, pairs = GATES * hidden / 2, units = tile * TILE, is_last = behind == call->steps;
    if (!is_last) {
        const uint16_t *gates = work->of_gates + (place(call, behind) * call->batch + row) * GATES * hidden;
        product(rows, TILE, pairs, gates, 2 * GATES * hidden, 4, work->packed + tile * pairs * TILE, pairs, sums, TILE, 0);
    }
    for (int64_t unit = units; unit < least(units + TILE, hidden); unit += UNITS)
        compute_gradients(work, behind, row, rows, unit, is_last ? 0 : sums + unit - units);
}

static void pack_backward(const Work *work, int64_t tile) {
    int64_t hidden = work->call->hidden, depth = GATES * hidden;
    pack_pairs(work->weight + tile * TILE, hidden, depth, least(TILE, hidden - tile * TILE),
               work->packed + tile * (depth / 2) * TILE);
}

/* --------------------------------------------------------------------------------------------------- steps */

typedef void Pack(const Work *, int64_t);
typedef void Compute(const Work *, int64_t, int64_t, int64_t, int64_t);

/* Lets threads compute tiles of some rows of all steps, from the first one or from behind the last one. */
static void compute(const Work *work, int64_t tiles, Pack *pack, Compute *compute_tile, int backward, int threads) {
    int64_t batch = work->call->batch, blocks = divided(batch, ROWS), all = tiles * blocks;
    int64_t steps = work->call->steps + backward;
#pragma omp parallel num_threads((int)least(threads, all))
    {
        int64_t thread = omp_get_thread_num(), given = omp_get_num_threads();
        int64_t from = all * thread / given, end = all * (thread + 1) / given;
        for (int64_t i = thread; i < tiles; i += given) pack(work, i);
        for (int64_t step = 0; step < steps; step++) {
#pragma omp barrier
            for (int64_t i = from; i < end; i++) {
                int64_t row = i % blocks * ROWS;
                compute_tile(work, backward ? steps - 1 - step : step, i / blocks, row, least(ROWS, batch - row));
            }
        }
    }
}

/* Writes gates and cells into `states`, and the outputs, and these before they are rounded if `wide_out` is not NULL. If
   `inputs` is NULL, `states` has their products. */
void lstm_forward(const Call *call, const uint16_t *inputs, const uint16_t *of_inputs, const uint16_t *weight,
                  const float *bias, const uint16_t *first_outputs, const float *first_cells, float *states,
                  uint16_t *out, float *wide_out, char *scratch, int threads) {
    Work work = {.call = call, .wide_out = wide_out, .inputs = inputs, .of_inputs = of_inputs, .weight = weight, .bias = bias};
    work.first_outputs = first_outputs, work.first_cells = first_cells, work.states = states, work.out = out;
    work.packed = (uint32_t *)scratch;
    compute(&work, divided(call->hidden, UNITS), pack_forward, forward_tile, 0, threads);
}

/* Writes the gradients of the gates before their activations, of all steps, of the bias, and of the first outputs.
   `of_cells` is the gradient of the last cells, and becomes that of the first ones. */
void lstm_backward(const Call *call, const uint16_t *weight, const float *first_cells, float *states,
                   const void *of_out, const void *of_last_output, float *of_cells, uint16_t *of_gates,
                   float *of_bias, void *of_first_output, char *scratch, int threads) {
    int64_t blocks = divided(call->batch, ROWS), width = GATES * call->hidden;
    Work work = {.call = call, .weight = weight, .first_cells = first_cells, .states = states, .of_out = of_out};
    work.of_last_output = of_last_output, work.of_cells = of_cells, work.of_gates = of_gates;
    work.of_first_output = of_first_output, work.packed = (uint32_t *)scratch;
    work.of_bias = (float *)(scratch + packed_bytes(call, 1));
    memset(work.of_bias, 0, 4 * blocks * width);
    compute(&work, divided(call->hidden, TILE), pack_backward, backward_tile, 1, threads);
    memcpy(of_bias, work.of_bias, 4 * width);
    for (int64_t block = 1; block < blocks; block++)
        for (int64_t i = 0; i < width; i++) of_bias[i] += work.of_bias[block * width + i];
}
#endif
