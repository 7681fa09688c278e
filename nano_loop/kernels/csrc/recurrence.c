/* The recurrence of an RNN, GRU or LSTM layer, and its gradients.

   The products of many inputs with their weights are computed before the recurrence, and those for the weight gradients
   after it, since they do not depend on previous time steps. A tile of sums has all gates of some units, or the state
   gradients of some more, so that a thread computes everything else for these units while they are in the cache.

   Threads share the sequences of a batch, which are independent, so no thread waits for another one in a time step. If
   the weights exceed a core's cache, or sequences are few, threads share the tiles, and synchronize in each step. Each
   element is computed by one thread, in an order independent of the number of threads.

   The number of sequences may decrease over time steps, as in packed sequences: the rows of a step are `offsets[step]`
   to `offsets[step + 1]`, with the longest sequences first.

   Everything but products is in fp32. Their operands are rounded to bf16 if requested and if the CPU has the bf16
   instructions of AVX-512. */
#include "denormals.h"
#include "exponential.h"
#include "fp32_product.h"
#include "threads.h"

#define CACHED (3 << 18)        /* bytes of weights that stay in a core's cache along with other data */
#define STEP_TO_SHARE (1 << 18) /* multiplications per step that take far longer than synchronizing */
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define HAS_BF16
#include "bf16_products.h"
#endif

/* ------------------------------------------------------------------------------------------------- vectors */

#ifdef HAS_BF16
INLINE __mmask16 first_of(int64_t count) { return (__mmask16)((1u << least(count, WIDTH)) - 1); }

INLINE Vector load_rounded(const uint16_t *from, int64_t count) {
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_of(count), from)), 16);
}

INLINE void store_rounded(uint16_t *to, int64_t count, Vector numbers) {
    _mm256_mask_storeu_epi16(to, first_of(count), (__m256i)_mm512_cvtneps_pbh((__m512)numbers));
}
#else
INLINE Vector load_rounded(const uint16_t *from, int64_t count) { return (Vector){0}; }
INLINE void store_rounded(uint16_t *to, int64_t count, Vector numbers) {}
#endif

/* Clips values to [-bound, bound]. NaN is preserved. */
INLINE Vector clipped(Vector x, float bound) {
    const Vector largest = (Vector){0} + bound;
#if defined(__AVX512F__)
    return (Vector)_mm512_min_ps((__m512)largest, _mm512_max_ps((__m512)-largest, (__m512)x));
#elif defined(__AVX2__)
    return (Vector)_mm256_min_ps((__m256)largest, _mm256_max_ps((__m256)-largest, (__m256)x));
#else
    Vector above = CHOOSE(x < -largest, -largest, x);
    return CHOOSE(above > largest, largest, above);
#endif
}

/* With AVX-512, by a 14-bit reciprocal and one Newton step, with an error of 2^-28: faster than a division. */
INLINE Vector quotient(Vector a, Vector divisor) {
#if defined(__AVX512F__)
    Vector reciprocal = (Vector)_mm512_rcp14_ps((__m512)divisor), near = a * reciprocal;
    return near + reciprocal * (a - near * divisor);
#else
    return a / divisor;
#endif
}

INLINE Vector sigmoid(Vector x) {
    Vector power, p = exponential_parts(-clipped(x, 87.0f), &power);
    return quotient((Vector){0} + 1.0f, power * p + (power + 1.0f));
}

/* Below 0.625 a polynomial, as in Cephes' tanhf; above, 1 - 2 / (exp(2|x|) + 1) with the sign of x. The error is at most
   1.2 units in the last place. By one formula for both, it would be 2.5. */
INLINE Vector hyperbolic_tangent(Vector x) {
    Vector square = x * x, bounded = clipped(x, 10.0f);
    Words sign = (Words)x & 0x80000000u;
    Vector power, p = exponential_parts(2.0f * (Vector)((Words)bounded ^ sign), &power);
    Vector large = 1.0f - quotient((Vector){0} + 2.0f, power * p + (power + 1.0f));
    Vector small = square * -5.70498872745e-3f + 2.06390887954e-2f;
    small = small * square - 5.37397155531e-2f;
    small = small * square + 1.33314422036e-1f;
    small = small * square - 3.33332819422e-1f;
    small = small * square * x + x;
    return CHOOSE(square < 0.390625f, small, (Vector)((Words)large | sign));
}

/* The derivatives given the values: x (1 - x) for the sigmoid, and 1 - x² for tanh. */
INLINE Vector slope(Vector x) { return x - x * x; }
INLINE Vector slope_of_tangent(Vector x) { return 1.0f - x * x; }

/* ------------------------------------------------------------------------------------------------ products */

#ifdef HAS_BF16
/* `product_of_tile` for rows of pairs of bf16 values, with a tile of such pairs. */
INLINE void product_of_rounded_tile(const int rows, const int vectors, int64_t pairs, const float *const *a,
                                    int64_t a_step, const float *tile, int64_t tile_step, float *sums) {
    product_of_pairs(rows, vectors, pairs, (const char *const *)a, 4 * a_step, tile, tile_step, sums, TILE, 0);
}
FUNCTIONS(IN_BF16, product_of_rounded_tile)

/* Rounds a tile in place: two values that are summed together become one word. Only half of it is used then. */
static void round_tile(float *tile, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int64_t at = 0; at < TILE; at += WIDTH) {
            __m512 low = _mm512_loadu_ps(tile + k * TILE + at), high = _mm512_setzero_ps();
            if (k + 1 < depth) high = _mm512_loadu_ps(tile + (k + 1) * TILE + at);
            __m512i of_low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
            __m512i of_high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
            _mm512_storeu_si512(tile + k / 2 * TILE + at, _mm512_or_si512(of_low, _mm512_slli_epi32(of_high, 16)));
        }
}
#else
#define IN_BF16 IN_FP32
static void round_tile(float *tile, int64_t depth) {}
#endif

/* ------------------------------------------------------------------------------------------------- a layer */

enum { RELU, TANH, LSTM, GRU }; /* torch's modes */

/* Sizes. `inputs` is the number of inputs multiplied within the time steps of a forward, or 0 if that was done before.
   Flags: reversed (the last time step is computed first), packed (the number of sequences may decrease), trained (the
   data for the backward is kept), and rounded operands (operands are in bf16, and output gradients may be, too). */
typedef struct {
    int64_t mode, steps, batch, inputs, hidden, is_reversed, is_packed, is_trained, is_rounded, gradient_is_rounded;
} Call;

/* A call and its tensors, most of which have a row per time step and sequence. Operands are multiplied by weights. */
typedef struct {
    const Call *call;
    const int64_t *offsets;
    const void *inputs;                   /* operands, or NULL */
    const float *input_weight, *weight;   /* of inputs and states, in rows of gates, or NULL */
    const float *input_bias, *state_bias; /* or NULL */
    const float *first, *first_cells;     /* the initial states */
    const void *first_states;             /* `first` as operands */
    float *gates; /* the precomputed products of inputs, then the gates of all units; or NULL */
    float *inner; /* the cells of an LSTM; for a GRU, the values that the reset gate multiplies, or NULL */
    float *out;   /* may be NULL for an LSTM with rounded operands */
    void *states; /* operands: the outputs. Like `first_states`, NULL if not rounded */
    float *last, *last_cells;
    /* Gradients: */
    const void *of_out;         /* or NULL */
    float *of_state, *of_cells; /* of the state after the current steps, without the products of `of_gates` */
    void *of_gates;             /* operands; for a GRU: of the new gate's inner part, both sigmoids, and the new gate */
    float *of_bias;             /* the sums of `of_gates` */
    void *before;               /* not a gradient, but operands: the states before each time step, written if packed */
    float *of_inputs, *of_input_weight, *of_weight; /* or NULL */
    float *packed, *packed_inputs, *bias, *zeros;
} Layer;

/* The rows of a time step in the tensors, and of the steps computed before and after it in a forward. */
typedef struct {
    int64_t row, count;
} Rows;
typedef struct {
    Rows before, now, after;
} Step;

INLINE int64_t gates_in(int64_t mode) { return mode == LSTM ? 4 : mode == GRU ? 3 : 1; }
INLINE int64_t gradients_in(int64_t mode) { return mode == LSTM || mode == GRU ? 4 : 1; }
INLINE int64_t gates_of(const Call *call) { return gates_in(call->mode); }
INLINE int64_t gradients_of(const Call *call) { return gradients_in(call->mode) * call->hidden; }

INLINE int is_rounded(const Call *call) {
#ifdef HAS_BF16
    return call->is_rounded != 0;
#else
    return 0;
#endif
}

/* The bytes of a row of operands. Rounded rows have an even number of values, zero-padded. */
INLINE int64_t bytes_of_row(const Call *call, int64_t width) {
    return is_rounded(call) ? 2 * up_to(width, 2) : 4 * width;
}
INLINE void *operands(const Call *call, const void *memory, int64_t row, int64_t width) {
    return (char *)memory + row * bytes_of_row(call, width);
}
INLINE void store_operands(const Call *call, void *memory, int64_t row, int64_t width, int64_t at, Vector numbers,
                           int64_t count) {
    void *to = operands(call, memory, row, width);
    if (is_rounded(call)) store_rounded((uint16_t *)to + at, count + width % 2, numbers);
    else store((float *)to + at, count, numbers);
}

/* The address of a packed tile. */
INLINE float *tile_at(float *packed, int64_t tile, int64_t depth) { return packed + tile * TILE * depth; }

INLINE void product(const Call *call, int64_t rows, int64_t vectors, int64_t depth, const float *const *a,
                    const float *tile, float *sums) {
    (is_rounded(call) ? IN_BF16 : IN_FP32)[vectors - 1](rows, is_rounded(call) ? divided(depth, 2) : depth, a, 1, tile, TILE, sums);
}

/* The number of units per tile of the forward, with all their gates, and the number of vectors. */
INLINE int64_t units_of_tile(int64_t kinds) { return kinds == 1 ? TILE : WIDTH; }
INLINE int64_t vectors_of_tile(int64_t kinds, int64_t unit, int64_t hidden) {
    return kinds == 1 ? vectors_at(unit, hidden) : kinds;
}
INLINE int64_t tiles_of(const Call *call, int backward) {
    return divided(call->hidden, backward ? TILE : units_of_tile(gates_of(call)));
}

/* The number of floats that a call needs: for the packed weights of states and inputs, biases, and a row of zeros. */
enum { WEIGHT, INPUTS, BIAS, ZEROS, PLACES };
static int64_t lay_out(const Call *call, int backward, int64_t sizes[PLACES]) {
    int64_t tiles = tiles_of(call, backward), depth = (backward ? gates_of(call) : 1) * call->hidden;
    sizes[WEIGHT] = tiles * TILE * depth;
    sizes[INPUTS] = backward ? 0 : tiles * TILE * call->inputs;
    sizes[BIAS] = backward ? 0 : 4 * up_to(call->hidden, WIDTH);
    sizes[ZEROS] = backward ? up_to(depth, WIDTH) : 0;
    int64_t sum = 0;
    for (int i = 0; i < PLACES; i++) sum += sizes[i];
    return sum;
}

/* The size of this memory in bytes, including a cache line for alignment. */
int64_t recurrence_bytes(const Call *call, int backward) {
    int64_t sizes[PLACES];
    return 64 + 4 * lay_out(call, backward, sizes);
}

/* The rows of the time step that a forward computes at `time`: none before the first and after the last one. */
INLINE Rows rows_at(const Layer *work, int64_t time) {
    int64_t steps = work->call->steps, step = work->call->is_reversed ? steps - 1 - time : time;
    Rows none = {0, 0}, rows = {work->offsets[least(most(step, 0), steps)], 0};
    if (time < 0 || time >= steps) return none;
    rows.count = work->offsets[step + 1] - rows.row;
    return rows;
}
INLINE Step step_at(const Layer *work, int64_t time) {
    Step step = {rows_at(work, time - 1), rows_at(work, time), rows_at(work, time + 1)};
    return step;
}

/* The states before a time step. */
INLINE const void *operands_before(const Layer *work, const Step *step, int64_t row) {
    int64_t hidden = work->call->hidden;
    if (row < step->before.count) return operands(work->call, work->states, step->before.row + row, hidden);
    return operands(work->call, work->first_states, row, hidden);
}
INLINE const float *numbers_before(const Step *step, int64_t row, const float *all, const float *before_all,
                                   int64_t width) {
    return row < step->before.count ? all + (step->before.row + row) * width : before_all + row * width;
}

/* The first sequence of a part of the batch. Parts have similar total lengths. */
static int64_t first_of_part(const Layer *work, int64_t part, int64_t parts) {
    int64_t steps = work->call->steps, before = 0, row = 0, part_begins = work->offsets[steps] * part / parts;
    for (; row < work->call->batch && before < part_begins; row++) {
        while (work->offsets[steps] - work->offsets[steps - 1] <= row) steps--; /* time steps of this sequence */
        before += steps;
    }
    return row;
}

/* A thread's work: a range of tiles for some sequences. If tiles are shared, it synchronizes in each time step. */
typedef struct {
    int64_t tile, behind_tiles, row, behind_rows;
    int waits;
} Part;

/* ------------------------------------------------------------------------------------------------- forward */

/* Computes units of a sequence from their gates' sums: those of states at stride WIDTH, those of inputs at `apart`. */
INLINE void compute_units(const int mode, const Layer *work, const Step *step, int64_t row, int64_t unit,
                          const float *of_inputs, int64_t apart, const float *of_states) {
    const Call *call = work->call;
    int64_t hidden = call->hidden, count = hidden - unit, at = step->now.row + row, kinds = gates_in(mode);
    int64_t of_gate = up_to(hidden, WIDTH);
    float *gates = call->is_trained && kinds > 1 ? work->gates + at * kinds * hidden + unit : 0;
    float *inner = mode == LSTM || (mode == GRU && call->is_trained) ? work->inner + at * hidden + unit : 0;
    const float *bias = work->bias + unit;
    Vector states[4], inputs[4], output;
    for (int i = 0; i < kinds; i++) {
        states[i] = *(const Unaligned *)(of_states + i * WIDTH) + *(const Unaligned *)(bias + i * of_gate);
        inputs[i] = load(of_inputs + i * apart, call->inputs ? WIDTH : count);
    }
    if (mode == GRU) {
        Vector before = load(numbers_before(step, row, work->out, work->first, hidden) + unit, count);
        Vector reset = sigmoid(inputs[0] + states[0]), update = sigmoid(inputs[1] + states[1]);
        Vector new = hyperbolic_tangent(inputs[2] + *(const Unaligned *)(bias + 3 * of_gate) + reset * states[2]);
        output = (before - new) * update + new;
        if (call->is_trained) {
            store(gates, count, reset);
            store(gates + hidden, count, update);
            store(gates + 2 * hidden, count, new);
            store(inner, count, states[2]);
        }
    } else if (mode == LSTM) {
        Vector before = load(numbers_before(step, row, work->inner, work->first_cells, hidden) + unit, count);
        Vector input = sigmoid(inputs[0] + states[0]), forget = sigmoid(inputs[1] + states[1]);
        Vector cell = hyperbolic_tangent(inputs[2] + states[2]), of_output = sigmoid(inputs[3] + states[3]);
        Vector cells = forget * before + input * cell;
        output = of_output * hyperbolic_tangent(cells);
        store(inner, count, cells);
        if (row >= step->after.count) store(work->last_cells + row * hidden + unit, count, cells);
        if (call->is_trained) {
            store(gates, count, input);
            store(gates + hidden, count, forget);
            store(gates + 2 * hidden, count, cell);
            store(gates + 3 * hidden, count, of_output);
        }
    } else {
        Vector sum = inputs[0] + states[0];
        output = mode == TANH ? hyperbolic_tangent(sum) : CHOOSE(sum < 0.0f, (Vector){0}, sum);
    }
    if (work->out) store(work->out + at * hidden + unit, count, output);
    if (is_rounded(call)) store_operands(call, work->states, at, hidden, unit, output, count);
    if (row >= step->after.count) store(work->last + row * hidden + unit, count, output);
}

/* Computes the units of a tile for some sequences at one time step. */
INLINE void forward_tile(const int mode, const Layer *work, const Step *step, int64_t tile, int64_t row, int64_t rows) {
    const Call *call = work->call;
    const float *from[ROWS];
    float of_states[ROWS * TILE] __attribute__((aligned(64))), of_inputs[ROWS * TILE] __attribute__((aligned(64)));
    int64_t hidden = call->hidden, inputs = call->inputs, kinds = gates_in(mode);
    int64_t unit = tile * units_of_tile(kinds), vectors = vectors_of_tile(kinds, unit, hidden), at = step->now.row + row;
    for (int64_t i = 0; i < rows; i++) from[i] = operands_before(work, step, row + i);
    product(call, rows, vectors, hidden, from, tile_at(work->packed, tile, hidden), of_states);
    if (inputs) {
        for (int64_t i = 0; i < rows; i++) from[i] = operands(call, work->inputs, at + i, inputs);
        product(call, rows, vectors, inputs, from, tile_at(work->packed_inputs, tile, inputs), of_inputs);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < vectors; j += kinds) {
            int64_t here = unit + j / kinds * WIDTH;
            const float *sums = of_states + i * TILE + j * WIDTH, *added = of_inputs + i * TILE + j * WIDTH;
            if (!inputs) added = work->gates + (at + i) * kinds * hidden + here; /* all gates, laid out as a product */
            compute_units(mode, work, step, row + i, here, added, inputs ? WIDTH : hidden, sums);
        }
}

/* Computes each tile for all sequences, because it stays in the cache. */
INLINE void forward_part(const int mode, const Layer *work, const Part *part) {
    for (int64_t time = 0; time < work->call->steps; time++) {
        Step step = step_at(work, time);
        int64_t end = least(part->behind_rows, step.now.count);
        if (part->waits) {
#pragma omp barrier
        }
        for (int64_t tile = part->tile; tile < part->behind_tiles; tile++)
            for (int64_t row = part->row; row < end; row += ROWS)
                forward_tile(mode, work, &step, tile, row, least(ROWS, end - row));
    }
}

/* Packs the gates of a tile's units. */
static void pack_gates(const Call *call, const float *matrix, int64_t depth, int64_t tile, float *packed) {
    int64_t kinds = gates_of(call), unit = tile * units_of_tile(kinds);
    int64_t vectors = vectors_of_tile(kinds, unit, call->hidden);
    for (int64_t i = 0; i < vectors; i++) {
        int64_t from = unit + i / kinds * WIDTH;
        pack_transposed(matrix + (i % kinds * call->hidden + from) * depth, depth, call->hidden - from, depth, TILE,
                        tile_at(packed, tile, depth) + i * WIDTH);
    }
    if (is_rounded(call)) round_tile(tile_at(packed, tile, depth), depth);
}

/* Adds the biases of a gate. The input bias of a GRU's new gate is separate. */
static void pack_bias(const Layer *work, int64_t gate, float *to) {
    int64_t hidden = work->call->hidden, is_apart = work->call->mode == GRU && gate >= 2;
    for (int64_t i = 0; i < up_to(hidden, WIDTH); i++) {
        float sum = 0;
        if (i < hidden && work->state_bias && gate < gates_of(work->call)) sum += work->state_bias[gate * hidden + i];
        if (i < hidden && work->input_bias && (!is_apart || gate == 3))
            sum += work->input_bias[(is_apart ? 2 : gate) * hidden + i];
        to[i] = sum;
    }
}

static void pack_forward(const Layer *work, int64_t part, int64_t parts) {
    const Call *call = work->call;
    int64_t gates = call->mode == GRU ? 4 : gates_of(call);
    for (int64_t tile = part; tile < tiles_of(call, 0); tile += parts) {
        pack_gates(call, work->weight, call->hidden, tile, work->packed);
        if (call->inputs) pack_gates(call, work->input_weight, call->inputs, tile, work->packed_inputs);
    }
    for (int64_t gate = part; gate < gates; gate += parts)
        pack_bias(work, gate, work->bias + gate * up_to(call->hidden, WIDTH));
}

/* ------------------------------------------------------------------------------------------------ backward */

/* Computes the gradients of the units' gates from that of their output. */
INLINE void differentiate_units(const int mode, const Layer *work, const Step *step, int64_t row, int64_t unit,
                                Vector of_output) {
    const Call *call = work->call;
    int64_t hidden = call->hidden, count = hidden - unit, at = step->now.row + row, kinds = gates_in(mode);
    int64_t width = gradients_in(mode) * hidden;
    const float *gates = mode == LSTM || mode == GRU ? work->gates + at * kinds * hidden + unit : 0;
    Vector of_gates[4];
    if (mode == GRU) {
        Vector reset = load(gates, count), update = load(gates + hidden, count), new = load(gates + 2 * hidden, count);
        Vector inner = load(work->inner + at * hidden + unit, count);
        Vector before = load(numbers_before(step, row, work->out, work->first, hidden) + unit, count);
        of_gates[3] = of_output * (1.0f - update) * slope_of_tangent(new);
        of_gates[0] = of_gates[3] * reset;
        of_gates[1] = of_gates[3] * inner * slope(reset);
        of_gates[2] = of_output * (before - new) * slope(update);
        store(work->of_state + row * hidden + unit, count, of_output * update);
    } else if (mode == LSTM) {
        Vector input = load(gates, count), forget = load(gates + hidden, count), cell = load(gates + 2 * hidden, count);
        Vector output = load(gates + 3 * hidden, count);
        Vector before = load(numbers_before(step, row, work->inner, work->first_cells, hidden) + unit, count);
        Vector squashed = hyperbolic_tangent(load(work->inner + at * hidden + unit, count));
        float *running = work->of_cells + row * hidden + unit;
        Vector of_cells = load(running, count) + of_output * output * slope_of_tangent(squashed);
        of_gates[0] = of_cells * cell * slope(input);
        of_gates[1] = of_cells * before * slope(forget);
        of_gates[2] = of_cells * input * slope_of_tangent(cell);
        of_gates[3] = of_output * squashed * slope(output);
        store(running, count, of_cells * forget);
    } else {
        Vector output = load(work->out + at * hidden + unit, count);
        Vector of_sum = CHOOSE(output <= 0.0f, (Vector){0}, of_output);
        of_gates[0] = mode == TANH ? of_output * slope_of_tangent(output) : of_sum;
    }
    for (int i = 0; i < gradients_in(mode); i++)
        store_operands(call, work->of_gates, at, width, i * hidden + unit, of_gates[i], count);
}

/* Computes the gradients for a tile at one time step for some sequences, and for the initial states of sequences that
   start after it. */
INLINE void backward_tile(const int mode, const Layer *work, const Step *step, int64_t tile, int64_t row, int64_t rows) {
    const Call *call = work->call;
    const float *from[ROWS];
    float sums[ROWS * TILE] __attribute__((aligned(64)));
    int64_t hidden = call->hidden, at = tile * TILE, vectors = vectors_at(at, hidden);
    int64_t depth = gates_in(mode) * hidden, width = gradients_in(mode) * hidden;
    for (int64_t i = 0; i < rows; i++) {
        int is_behind = row + i < step->after.count;
        from[i] = is_behind ? operands(call, work->of_gates, step->after.row + row + i, width) : work->zeros;
        if (call->is_packed && !tile && row + i < step->now.count)
            memcpy(operands(call, work->before, step->now.row + row + i, hidden), operands_before(work, step, row + i),
                   (size_t)bytes_of_row(call, hidden));
    }
    const float *packed = tile_at(work->packed, tile, depth);
    if (row < step->after.count) product(call, rows, vectors, depth, from, packed, sums);
    else memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < vectors; j++) {
            int64_t unit = at + j * WIDTH, count = hidden - unit, here = (step->now.row + row + i) * hidden + unit;
            float *of_state = work->of_state + (row + i) * hidden + unit;
            Vector gradient = *(const Unaligned *)(sums + i * TILE + j * WIDTH);
            if (mode == GRU || row + i >= step->after.count) gradient += load(of_state, count);
            if (row + i >= step->now.count) {
                store(of_state, count, gradient);
                continue;
            }
            if (work->of_out)
                gradient += call->gradient_is_rounded ? load_rounded((const uint16_t *)work->of_out + here, count)
                                                      : load((const float *)work->of_out + here, count);
            differentiate_units(mode, work, step, row + i, unit, gradient);
        }
}

INLINE void backward_part(const int mode, const Layer *work, const Part *part) {
    for (int64_t time = work->call->steps - 1; time >= -1; time--) {
        Step step = step_at(work, time);
        int64_t end = least(part->behind_rows, most(step.now.count, step.after.count));
        if (part->waits) {
#pragma omp barrier
        }
        for (int64_t tile = part->tile; tile < part->behind_tiles; tile++)
            for (int64_t row = part->row; row < end; row += ROWS)
                backward_tile(mode, work, &step, tile, row, least(ROWS, end - row));
    }
}

/* Packs columns of a matrix, from column `from` on, as the rows of a tile. Missing ones are 0. */
static void pack_columns(const Call *call, const float *matrix, int64_t depth, int64_t from, int64_t columns,
                         int64_t tile, float *packed) {
    int64_t row = columns;
    float *to = tile_at(packed, tile, depth);
    matrix += tile * TILE, columns -= tile * TILE;
    pack_tile(matrix + from * row, row, 1, columns, depth - from, TILE, to);
    pack_tile(matrix, row, 1, columns, from, TILE, to + (depth - from) * TILE);
    if (is_rounded(call)) round_tile(to, depth);
}

static void pack_backward(const Layer *work, int64_t part, int64_t parts) {
    const Call *call = work->call;
    int64_t hidden = call->hidden, depth = gates_of(call) * hidden;
    for (int64_t tile = part; tile < divided(hidden, TILE); tile += parts)
        pack_columns(call, work->weight, depth, call->mode == GRU ? 2 * hidden : 0, hidden, tile, work->packed);
}

/* Sums the gradients of gates over all rows, for a range of columns. */
static void sum_columns(const Layer *work, int64_t column, int64_t end) {
    const Call *call = work->call;
    int64_t rows = work->offsets[call->steps], width = gradients_of(call);
    for (int64_t from = 0; from < rows; from += CHUNK)
        for (int64_t at = column; at < end; at += WIDTH) {
            Vector sum = {0};
            for (int64_t row = from; row < least(rows, from + CHUNK); row++) {
                const void *numbers = operands(call, work->of_gates, row, width);
                sum += is_rounded(call) ? load_rounded((const uint16_t *)numbers + at, width - at)
                                        : load((const float *)numbers + at, width - at);
            }
            if (from) sum += load(work->of_bias + at, width - at);
            store(work->of_bias + at, width - at, sum);
        }
}

/* Computes a part of the rows of a product. */
static void multiply_part(const Shape *shape, const float *a, const float *b, float *out, int64_t part, int64_t parts) {
    Work product_of_all = {shape, a, b, 0, out};
    int64_t groups = divided(shape->rows, ROWS), end = least(shape->rows, groups * (part + 1) / parts * ROWS);
    multiply(&product_of_all, groups * part / parts * ROWS, end, 0, shape->columns);
}

/* Computes a part of the gradients that are products over all time steps. For a GRU, the gradients for hidden states
   start with the new gate, and those for inputs end with it. */
static void multiply_gradients(const Layer *work, int64_t part, int64_t parts) {
    const Call *call = work->call;
    int64_t rows = work->offsets[call->steps], hidden = call->hidden, gates = gates_of(call) * hidden;
    int64_t width = gradients_of(call), inputs = call->inputs, of_new = call->mode == GRU ? hidden : 0;
    const float *of_states = work->of_gates, *of_sums = of_states + of_new;
    Shape shape = {rows, inputs, gates, width, 1, inputs, 1};
    if (work->of_inputs) multiply_part(&shape, of_sums, work->input_weight, work->of_inputs, part, parts);
    Shape of_weight = {gates, inputs, rows, 1, width, inputs, 1};
    if (work->of_input_weight) multiply_part(&of_weight, of_sums, work->inputs, work->of_input_weight, part, parts);
    if (!work->of_weight) return;
    of_weight.rows = gates - of_new, of_weight.columns = of_weight.b_step = hidden;
    multiply_part(&of_weight, of_sums, work->before, work->of_weight, part, parts);
    of_weight.rows = of_new;
    if (of_new) multiply_part(&of_weight, of_states, work->before, work->of_weight + 2 * hidden * hidden, part, parts);
}

/* --------------------------------------------------------------------------------------------------- calls */

typedef void OfMode(const Layer *, const Part *);
#define OF_MODE(MODE)                                                                                                  \
    static void forward_##MODE(const Layer *work, const Part *part) { forward_part(MODE, work, part); }                 \
    static void backward_##MODE(const Layer *work, const Part *part) { backward_part(MODE, work, part); }
OF_MODE(RELU)
OF_MODE(TANH)
OF_MODE(LSTM)
OF_MODE(GRU)
static OfMode *const FORWARD[] = {forward_RELU, forward_TANH, forward_LSTM, forward_GRU};
static OfMode *const BACKWARD[] = {backward_RELU, backward_TANH, backward_LSTM, backward_GRU};

/* Packs the weights in all threads, which then compute all time steps of their sequences or tiles. */
static void compute(Layer *work, int backward, char *scratch, int threads) {
    const Call *call = work->call;
    int64_t sizes[PLACES], *of = sizes;
    lay_out(call, backward, sizes);
    if (!is_rounded(call)) work->first_states = work->first, work->states = work->out;
    work->packed = (float *)up_to((int64_t)scratch, 64), work->packed_inputs = work->packed + of[WEIGHT];
    work->bias = work->packed_inputs + of[INPUTS], work->zeros = work->bias + of[BIAS];
    memset(work->zeros, 0, 4 * (size_t)of[ZEROS]);
    int64_t tiles = tiles_of(call, backward), depth = call->hidden + (backward ? 0 : call->inputs);
    int64_t multiplications = work->offsets[call->steps] * gates_of(call) * call->hidden * depth;
    int64_t parts = least(threads, 1 + multiplications / MULTIPLICATIONS);
    int shares_tiles = (4 * (of[WEIGHT] + of[INPUTS]) > CACHED || call->batch < 2 * parts) &&
                       multiplications / call->steps > STEP_TO_SHARE;
    if (!backward) parts = least(parts, shares_tiles ? tiles : call->batch);
#pragma omp parallel num_threads((int)parts)
    {
        int64_t number = omp_get_thread_num(), count = omp_get_num_threads();
        unsigned state = flush_denormals(backward);
        (backward ? pack_backward : pack_forward)(work, number, count);
#pragma omp barrier
        Part part = {0, tiles, 0, call->batch, 0};
        if (shares_tiles) {
            part.tile = tiles * number / count, part.behind_tiles = tiles * (number + 1) / count, part.waits = count > 1;
        } else {
            part.row = first_of_part(work, number, count), part.behind_rows = first_of_part(work, number + 1, count);
        }
        (backward ? BACKWARD : FORWARD)[call->mode](work, &part);
        if (backward) {
            int64_t width = gradients_of(call), vectors = divided(width, WIDTH);
#pragma omp barrier
            sum_columns(work, vectors * number / count * WIDTH, least(width, vectors * (number + 1) / count * WIDTH));
            multiply_gradients(work, number, count);
        }
        restore(state);
    }
}

/* Writes the outputs of all time steps, the last states, and the data for the backward: `gates` and `inner`. `gates`
   may be NULL for a GRU that is not trained, and both for an RNN. */
void recurrence_forward(const Call *call, const int64_t *offsets, const void *inputs, const float *input_weight,
                        const float *weight, const float *input_bias, const float *state_bias,
                        const float *first_outputs, const void *first_states, const float *first_cells, float *gates,
                        float *inner, float *out, void *states, float *last, float *last_cells, char *scratch,
                        int threads) {
    Layer work = {.call = call, .offsets = offsets, .inputs = inputs, .input_weight = input_weight, .weight = weight};
    work.input_bias = input_bias, work.state_bias = state_bias, work.first = first_outputs;
    work.first_states = first_states, work.first_cells = first_cells, work.gates = gates, work.inner = inner;
    work.out = out, work.states = states, work.last = last, work.last_cells = last_cells;
    compute(&work, 0, scratch, threads);
}

/* Writes the gradients of the gates before their activations, the sums of these, and the states before each time step
   if packed. For arguments that are not NULL, it also writes the gradients of inputs
   and weights, which are products over all time steps, in fp32. `of_state` and `of_cells` are the gradients of the last
   states, and are overwritten by those of the initial states. */
void recurrence_backward(const Call *call, const int64_t *offsets, const float *inputs, const float *input_weight,
                         const float *weight, const float *first_outputs, const void *first_states,
                         const float *first_cells, float *gates, float *inner, float *out, void *states,
                         const void *of_out, float *of_state, float *of_cells, void *of_gates, float *of_bias,
                         void *before, float *of_inputs, float *of_input_weight, float *of_weight, char *scratch,
                         int threads) {
    Layer work = {.call = call, .offsets = offsets, .inputs = inputs, .input_weight = input_weight, .weight = weight};
    work.first = first_outputs, work.first_states = first_states, work.first_cells = first_cells;
    work.gates = gates, work.inner = inner, work.out = out, work.states = states, work.of_out = of_out;
    work.of_state = of_state, work.of_cells = of_cells, work.of_gates = of_gates, work.of_bias = of_bias;
    work.before = before, work.of_inputs = of_inputs, work.of_input_weight = of_input_weight;
    work.of_weight = of_weight;
    compute(&work, 1, scratch, threads);
}
