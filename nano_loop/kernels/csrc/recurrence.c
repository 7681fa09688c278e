/* The recurrence of a layer of an RNN, a GRU or an LSTM, and its gradients, in fp32; products in bf16 if that is asked for.

   The products of the inputs with their weights are computed before, and those of the weights' gradients after it, since
   they depend on no step before. Threads share the sequences of a batch: none of them depends on another one, so no thread
   waits for another one in a step, and an element is computed in an order that does not depend on their number.

   Steps may have fewer sequences than those before, as packed ones do: a step's rows are those from `offsets[step]` to
   `offsets[step + 1]`, and those of the longest sequences come first. */
#include "fp32_functions.h"
#include "threads.h"

/* ------------------------------------------------------------------------------------------------- vectors */

/* x (1 - x), the slope of a sigmoid by its value; and 1 - x², that of the hyperbolic tangent. */
INLINE Vector slope(Vector x) { return x - x * x; }
INLINE Vector slope_of_tangent(Vector x) { return 1.0f - x * x; }

/* ------------------------------------------------------------------------------------------------ products */

#ifdef __AVX512BF16__
#define MOST_ROUNDED 8192 /* numbers of a row that is rounded on the stack */

/* The same in bf16, of rows without gaps. The tile has words of two numbers, which are summed together. */
INLINE void product_of_rounded_tile(const int rows, const int vectors, int64_t depth, const float *const *a, int64_t a_step,
                                    const float *tile, int64_t tile_step, float *sums) {
    int32_t rounded[ROWS][MOST_ROUNDED / 2] __attribute__((aligned(64)));
    __m512 totals[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        for (int64_t k = 0; k < depth; k += 2 * WIDTH) {
            Vector low = load(a[i] + k, depth - k), high = {0};
            if (k + WIDTH < depth) high = load(a[i] + k + WIDTH, depth - k - WIDTH);
            _mm512_store_si512(&rounded[i][k / 2], (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
        }
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) totals[i][j] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < (depth + 1) / 2; k++) {
        __m512bh columns[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) columns[j] = (__m512bh)_mm512_loadu_ps(tile + k * tile_step + j * WIDTH);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m512bh of_row = (__m512bh)_mm512_set1_epi32(rounded[i][k]);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) totals[i][j] = _mm512_dpbf16_ps(totals[i][j], of_row, columns[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) _mm512_storeu_ps(sums + i * TILE + j * WIDTH, totals[i][j]);
}
FUNCTIONS(IN_BF16, product_of_rounded_tile)

/* Rounds a tile, of which half is used then. */
static void round_tile(float *tile, int64_t depth, int64_t width) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int64_t at = 0; at < width; at += WIDTH) {
            const Vector zero = {0};
            Vector low = load(tile + k * width + at, WIDTH);
            Vector high = k + 1 < depth ? load(tile + (k + 1) * width + at, WIDTH) : zero;
            __m512i of_low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)low));
            __m512i of_high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)high));
            _mm512_storeu_si512(tile + k / 2 * width + at, _mm512_or_si512(of_low, _mm512_slli_epi32(of_high, 16)));
        }
}
#else
#define MOST_ROUNDED 0
#define IN_BF16 IN_FP32
static void round_tile(float *tile, int64_t depth, int64_t width) {}
#endif

/* Packs a tile of the columns of a matrix, whose rows begin with the one `from`. What is not there is 0. */
static void pack_columns(const float *matrix, int64_t depth, int64_t from, int64_t columns, int64_t column, float *tile) {
    int64_t width = vectors_at(column, columns) * WIDTH, count = least(width, columns - column);
    for (int64_t k = 0; k < depth; k++) {
        memcpy(tile + k * width, matrix + (from + k) % depth * columns + column, 4 * (size_t)count);
        memset(tile + k * width + count, 0, 4 * (size_t)(width - count));
    }
}

/* Packs rows of a matrix as a vector's columns, from `tile` on, of a tile of `width` columns. */
static void pack_rows(const float *matrix, int64_t depth, int64_t rows, int64_t width, float *tile) {
    for (int64_t i = 0; i < WIDTH; i++)
        for (int64_t k = 0; k < depth; k++) tile[k * width + i] = i < rows ? matrix[i * depth + k] : 0.0f;
}

/* ------------------------------------------------------------------------------------------------- a layer */

enum { RELU, TANH, LSTM, GRU }; /* torch's modes */

/* Sizes. The states that are multiplied have as many numbers as the outputs: those of the units, or of a projection of them.
   If it is reversed, the last step is computed first. In bf16, products round what they multiply, where the CPU has
   instructions for it. */
typedef struct {
    int64_t mode, steps, batch, hidden, outputs, is_reversed, in_bf16;
} Call;

/* A call, and its tensors, most of which have a row for each step and sequence. */
typedef struct {
    const Call *call;
    const int64_t *offsets;
    const float *weight, *bias;      /* of the states before, in rows of gates */
    const float *projection;         /* or NULL */
    const float *first, *first_cells; /* the states before the first step */
    float *gates;                    /* the products of the inputs, and then the gates of all units: not of an RNN */
    float *inner;                    /* cells of an LSTM; of a GRU, what the reset gate multiplies, or NULL */
    float *squashed;                 /* the outputs of the units before their projection, or NULL */
    float *out, *last, *last_cells;
    /* Gradients: */
    const float *of_out;       /* or NULL */
    float *of_state, *of_cells; /* of the state behind the steps that are computed, without the products of `of_gates` */
    float *of_gates;           /* of a GRU: of the inner part of the new gate, of both sigmoids, and of the new gate */
    float *of_projected;       /* of all that was projected, or NULL */
    float *before;             /* not a gradient: the states before all steps */
    float *packed, *packed_projection, *zeros;
} Work;

INLINE int64_t gates_in(int64_t mode) { return mode == LSTM ? 4 : mode == GRU ? 3 : 1; }
INLINE int64_t gradients_in(int64_t mode) { return mode == LSTM || mode == GRU ? 4 : 1; }
INLINE int64_t gates_of(const Call *call) { return gates_in(call->mode); }
INLINE int64_t is_projected(const Call *call) { return call->outputs != call->hidden; }

/* Whether rows of this many numbers are rounded to bf16 to be multiplied. */
INLINE int rounds(const Call *call, int64_t depth) { return call->in_bf16 && depth <= MOST_ROUNDED; }

INLINE void product(const Call *call, int64_t rows, int64_t vectors, int64_t depth, const float *const *a, const float *tile,
                    float *sums) {
    (rounds(call, depth) ? IN_BF16 : IN_FP32)[vectors - 1](rows, depth, a, 1, tile, vectors * WIDTH, sums);
}

/* Units of a tile of the forward, which has all their gates, and its vectors. */
INLINE int64_t units_of_tile(int64_t kinds) { return kinds == 1 ? TILE : WIDTH; }
INLINE int64_t vectors_of_tile(int64_t kinds, int64_t unit, int64_t hidden) {
    return kinds == 1 ? vectors_at(unit, hidden) : kinds;
}

/* Numbers of the packed weights of the states, and of those of the projection. */
INLINE int64_t packed_weight(const Call *call, int backward) {
    int64_t gates = gates_of(call);
    if (backward) return up_to(call->outputs, WIDTH) * gates * call->hidden;
    return up_to(call->hidden, WIDTH) * gates * call->outputs;
}
INLINE int64_t packed_projection(const Call *call, int backward) {
    if (!is_projected(call)) return 0;
    return backward ? up_to(call->hidden, WIDTH) * call->outputs : up_to(call->outputs, WIDTH) * call->hidden;
}

/* Bytes of memory that a call takes: for packed weights, and for a row of zeros. */
int64_t recurrence_bytes(const Call *call, int backward) {
    return 4 * (packed_weight(call, backward) + packed_projection(call, backward) + gates_of(call) * call->hidden);
}

/* The step that is computed at a time, in a forward. */
INLINE int64_t step_at(const Call *call, int64_t time) { return call->is_reversed ? call->steps - 1 - time : time; }

/* The sequences of the step that is computed at a time: none before the first one and behind the last one. */
INLINE int64_t sequences_at(const Work *work, int64_t time) {
    if (time < 0 || time >= work->call->steps) return 0;
    int64_t step = step_at(work->call, time);
    return work->offsets[step + 1] - work->offsets[step];
}

/* The row of a sequence in the tensors. */
INLINE int64_t place(const Work *work, int64_t time, int64_t row) {
    return work->offsets[step_at(work->call, time)] + row;
}

/* The outputs, and the cells, before the step that is computed at a time. */
INLINE const float *outputs_before(const Work *work, int64_t time, int64_t row) {
    int64_t outputs = work->call->outputs;
    if (row < sequences_at(work, time - 1)) return work->out + place(work, time - 1, row) * outputs;
    return work->first + row * outputs;
}
INLINE const float *cells_before(const Work *work, int64_t time, int64_t row) {
    int64_t hidden = work->call->hidden;
    if (row < sequences_at(work, time - 1)) return work->inner + place(work, time - 1, row) * hidden;
    return work->first_cells + row * hidden;
}

/* The first sequence of a part of the batch. Parts have about as many steps. */
static int64_t first_of_part(const Work *work, int64_t part, int64_t parts) {
    int64_t steps = work->call->steps, before = 0, row = 0, part_begins = work->offsets[steps] * part / parts;
    for (; row < work->call->batch && before < part_begins; row++) {
        while (work->offsets[steps] - work->offsets[steps - 1] <= row) steps--; /* of this sequence */
        before += steps;
    }
    return row;
}

/* ------------------------------------------------------------------------------------------------- forward */

/* Computes units of a sequence from the sums of their gates, which lie WIDTH apart. */
INLINE void compute_units(const int mode, const Work *work, int64_t time, int64_t row, int64_t unit, const float *sums) {
    const Call *call = work->call;
    int64_t hidden = call->hidden, count = hidden - unit, at = place(work, time, row), kinds = gates_in(mode);
    float *gates = work->gates + at * kinds * hidden + unit;
    const float *bias = work->bias + unit;
    float *out = (work->squashed ? work->squashed : work->out) + at * hidden + unit;
    Vector inner[4], of_inputs[4];
    for (int i = 0; i < kinds; i++) {
        inner[i] = *(const Unaligned *)(sums + i * WIDTH) + load(bias + i * hidden, count);
        of_inputs[i] = load(gates + i * hidden, count);
    }
    if (mode == GRU) {
        Vector reset = sigmoid(of_inputs[0] + inner[0]), update = sigmoid(of_inputs[1] + inner[1]);
        Vector new = hyperbolic_tangent(of_inputs[2] + reset * inner[2]);
        store(out, count, (load(outputs_before(work, time, row) + unit, count) - new) * update + new);
        if (!work->inner) return;
        store(gates, count, reset);
        store(gates + hidden, count, update);
        store(gates + 2 * hidden, count, new);
        store(work->inner + at * hidden + unit, count, inner[2]);
    } else if (mode == LSTM) {
        Vector input = sigmoid(of_inputs[0] + inner[0]), forget = sigmoid(of_inputs[1] + inner[1]);
        Vector cell = hyperbolic_tangent(of_inputs[2] + inner[2]), output = sigmoid(of_inputs[3] + inner[3]);
        Vector cells = forget * load(cells_before(work, time, row) + unit, count) + input * cell;
        store(out, count, output * hyperbolic_tangent(cells));
        store(work->inner + at * hidden + unit, count, cells);
        store(gates, count, input);
        store(gates + hidden, count, forget);
        store(gates + 2 * hidden, count, cell);
        store(gates + 3 * hidden, count, output);
    } else {
        Vector sum = of_inputs[0] + inner[0];
        store(out, count, mode == TANH ? hyperbolic_tangent(sum) : CHOOSE(sum < 0.0f, (Vector){0}, sum));
    }
}

/* Computes the units of a tile of some sequences, at a time. */
INLINE void forward_tile(const int mode, const Work *work, int64_t time, int64_t unit, int64_t row, int64_t rows) {
    const float *from[ROWS];
    float sums[ROWS * TILE] __attribute__((aligned(64)));
    int64_t hidden = work->call->hidden, outputs = work->call->outputs, kinds = gates_in(mode);
    int64_t vectors = vectors_of_tile(kinds, unit, hidden);
    for (int64_t i = 0; i < rows; i++) from[i] = outputs_before(work, time, row + i);
    product(work->call, rows, vectors, outputs, from, work->packed + unit * kinds * outputs, sums);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < vectors; j += kinds)
            compute_units(mode, work, time, row + i, unit + j / kinds * WIDTH, sums + i * TILE + j * WIDTH);
}

/* Computes outputs from the outputs of units. */
static void project_tile(const Work *work, int64_t time, int64_t at, int64_t row, int64_t rows) {
    const float *from[ROWS];
    float sums[ROWS * TILE] __attribute__((aligned(64)));
    int64_t hidden = work->call->hidden, outputs = work->call->outputs, vectors = vectors_at(at, outputs);
    for (int64_t i = 0; i < rows; i++) from[i] = work->squashed + place(work, time, row + i) * hidden;
    product(work->call, rows, vectors, hidden, from, work->packed_projection + at * hidden, sums);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < vectors; j++)
            store(work->out + place(work, time, row + i) * outputs + at + j * WIDTH, outputs - at - j * WIDTH,
                  *(const Unaligned *)(sums + i * TILE + j * WIDTH));
}

/* A tile is computed of all sequences, for it stays in the cache. */
INLINE void forward_part(const int mode, const Work *work, int64_t from, int64_t end) {
    int64_t hidden = work->call->hidden, outputs = work->call->outputs;
    int64_t units = units_of_tile(gates_in(mode));
    for (int64_t time = 0; time < work->call->steps; time++) {
        int64_t behind = least(end, sequences_at(work, time));
        for (int64_t unit = 0; unit < hidden; unit += units)
            for (int64_t row = from; row < behind; row += ROWS)
                forward_tile(mode, work, time, unit, row, least(ROWS, behind - row));
        for (int64_t at = 0; work->projection && at < outputs; at += TILE)
            for (int64_t row = from; row < behind; row += ROWS)
                project_tile(work, time, at, row, least(ROWS, behind - row));
        for (int64_t row = most(from, sequences_at(work, time + 1)); row < behind; row++) {
            int64_t at = place(work, time, row);
            memcpy(work->last + row * outputs, work->out + at * outputs, 4 * (size_t)outputs);
            if (mode == LSTM) memcpy(work->last_cells + row * hidden, work->inner + at * hidden, 4 * (size_t)hidden);
        }
    }
}

static void pack_forward(const Work *work, int64_t part, int64_t parts) {
    const Call *call = work->call;
    int64_t hidden = call->hidden, outputs = call->outputs, kinds = gates_of(call), units = units_of_tile(kinds);
    for (int64_t unit = part * units; unit < hidden; unit += parts * units) {
        int64_t vectors = vectors_of_tile(kinds, unit, hidden);
        float *tile = work->packed + unit * kinds * outputs;
        for (int64_t i = 0; i < vectors; i++) {
            int64_t from = unit + i / kinds * WIDTH; /* unit */
            pack_rows(work->weight + (i % kinds * hidden + from) * outputs, outputs, hidden - from, vectors * WIDTH,
                      tile + i * WIDTH);
        }
        if (rounds(call, outputs)) round_tile(tile, outputs, vectors * WIDTH);
    }
    if (!work->projection) return;
    for (int64_t at = part * TILE; at < outputs; at += parts * TILE) {
        int64_t vectors = vectors_at(at, outputs);
        float *tile = work->packed_projection + at * hidden;
        for (int64_t i = at; i < at + vectors * WIDTH; i += WIDTH)
            pack_rows(work->projection + i * hidden, hidden, outputs - i, vectors * WIDTH, tile + i - at);
        if (rounds(call, hidden)) round_tile(tile, hidden, vectors * WIDTH);
    }
}

/* ------------------------------------------------------------------------------------------------ backward */

/* Computes the gradients of the gates of units from that of their output. */
INLINE void differentiate_units(const int mode, const Work *work, int64_t time, int64_t row, int64_t unit, Vector of_output) {
    const Call *call = work->call;
    int64_t hidden = call->hidden, count = hidden - unit, at = place(work, time, row), kinds = gates_in(mode);
    const float *gates = work->gates ? work->gates + at * kinds * hidden + unit : 0;
    float *of_gates = work->of_gates + at * gradients_in(mode) * hidden + unit;
    float *of_state = work->of_state + row * hidden + unit; /* not of a projection */
    if (mode == GRU) {
        Vector reset = load(gates, count), update = load(gates + hidden, count), new = load(gates + 2 * hidden, count);
        Vector inner = load(work->inner + at * hidden + unit, count);
        Vector before = load(outputs_before(work, time, row) + unit, count);
        Vector of_new = of_output * (1.0f - update) * slope_of_tangent(new);
        store(of_gates, count, of_new * reset);
        store(of_gates + hidden, count, of_new * inner * slope(reset));
        store(of_gates + 2 * hidden, count, of_output * (before - new) * slope(update));
        store(of_gates + 3 * hidden, count, of_new);
        store(of_state, count, of_output * update);
    } else if (mode == LSTM) {
        Vector input = load(gates, count), forget = load(gates + hidden, count), cell = load(gates + 2 * hidden, count);
        Vector output = load(gates + 3 * hidden, count);
        Vector squashed = hyperbolic_tangent(load(work->inner + at * hidden + unit, count));
        float *running = work->of_cells + row * hidden + unit;
        Vector of_cells = load(running, count) + of_output * output * slope_of_tangent(squashed);
        store(of_gates, count, of_cells * cell * slope(input));
        store(of_gates + hidden, count, of_cells * load(cells_before(work, time, row) + unit, count) * slope(forget));
        store(of_gates + 2 * hidden, count, of_cells * input * slope_of_tangent(cell));
        store(of_gates + 3 * hidden, count, of_output * squashed * slope(output));
        store(running, count, of_cells * forget);
    } else {
        Vector output = load(work->out + at * hidden + unit, count);
        Vector of_sum = CHOOSE(output <= 0.0f, (Vector){0}, of_output);
        store(of_gates, count, mode == TANH ? of_output * slope_of_tangent(output) : of_sum);
    }
}

/* Computes the gradients of what a tile has computed at a time, of some sequences, and of the first states of those that
   have begun behind it. Those of a projection are only written. */
INLINE void backward_tile(const int mode, const Work *work, int64_t time, int64_t at, int64_t row, int64_t rows) {
    const float *from[ROWS];
    float sums[ROWS * TILE] __attribute__((aligned(64)));
    int64_t hidden = work->call->hidden, outputs = work->call->outputs, vectors = vectors_at(at, outputs);
    int64_t now = sequences_at(work, time), behind = sequences_at(work, time + 1), depth = gates_in(mode) * hidden;
    for (int64_t i = 0; i < rows; i++) {
        int64_t width = gradients_in(mode) * hidden;
        from[i] = row + i < behind ? work->of_gates + place(work, time + 1, row + i) * width : work->zeros;
    }
    if (row < behind) product(work->call, rows, vectors, depth, from, work->packed + at * depth, sums);
    else memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < vectors; j++) {
            int64_t unit = at + j * WIDTH, count = outputs - unit;
            float *of_state = work->of_state + (row + i) * outputs + unit;
            Vector gradient = *(const Unaligned *)(sums + i * TILE + j * WIDTH) + load(of_state, count);
            if (row + i >= now) {
                store(of_state, count, gradient);
                continue;
            }
            int64_t here = place(work, time, row + i) * outputs + unit;
            if (work->of_out) gradient += load(work->of_out + here, count);
            store(work->before + here, count, load(outputs_before(work, time, row + i) + unit, count));
            store(of_state, count, (Vector){0});
            if (work->projection) store(work->of_projected + here, count, gradient);
            else differentiate_units(mode, work, time, row + i, unit, gradient);
        }
}

/* Computes the gradients of units that were projected. */
static void differentiate_tile(const Work *work, int64_t time, int64_t unit, int64_t row, int64_t rows) {
    const float *from[ROWS];
    float sums[ROWS * TILE] __attribute__((aligned(64)));
    int64_t outputs = work->call->outputs, vectors = vectors_at(unit, work->call->hidden);
    for (int64_t i = 0; i < rows; i++) from[i] = work->of_projected + place(work, time, row + i) * outputs;
    product(work->call, rows, vectors, outputs, from, work->packed_projection + unit * outputs, sums);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < vectors; j++)
            differentiate_units(LSTM, work, time, row + i, unit + j * WIDTH,
                                *(const Unaligned *)(sums + i * TILE + j * WIDTH));
}

INLINE void backward_part(const int mode, const Work *work, int64_t from, int64_t end) {
    for (int64_t time = work->call->steps - 1; time >= -1; time--) {
        int64_t now = least(end, sequences_at(work, time)), behind = least(end, most(now, sequences_at(work, time + 1)));
        for (int64_t at = 0; at < work->call->outputs; at += TILE)
            for (int64_t row = from; row < behind; row += ROWS)
                backward_tile(mode, work, time, at, row, least(ROWS, behind - row));
        for (int64_t unit = 0; work->projection && unit < work->call->hidden; unit += TILE)
            for (int64_t row = from; row < now; row += ROWS)
                differentiate_tile(work, time, unit, row, least(ROWS, now - row));
    }
}

static void pack_backward(const Work *work, int64_t part, int64_t parts) {
    const Call *call = work->call;
    int64_t hidden = call->hidden, outputs = call->outputs, depth = gates_of(call) * hidden;
    for (int64_t at = part * TILE; at < outputs; at += parts * TILE) {
        float *tile = work->packed + at * depth;
        pack_columns(work->weight, depth, call->mode == GRU ? 2 * hidden : 0, outputs, at, tile);
        if (rounds(call, depth)) round_tile(tile, depth, vectors_at(at, outputs) * WIDTH);
    }
    if (!work->projection) return;
    for (int64_t at = part * TILE; at < hidden; at += parts * TILE) {
        float *tile = work->packed_projection + at * outputs;
        pack_columns(work->projection, outputs, 0, hidden, at, tile);
        if (rounds(call, outputs)) round_tile(tile, outputs, vectors_at(at, hidden) * WIDTH);
    }
}

/* --------------------------------------------------------------------------------------------------- calls */

typedef void OfMode(const Work *, int64_t, int64_t);
#define OF_MODE(MODE)                                                                                                  \
    static void forward_##MODE(const Work *work, int64_t from, int64_t end) { forward_part(MODE, work, from, end); }   \
    static void backward_##MODE(const Work *work, int64_t from, int64_t end) { backward_part(MODE, work, from, end); }
OF_MODE(RELU)
OF_MODE(TANH)
OF_MODE(LSTM)
OF_MODE(GRU)
static OfMode *const FORWARD[] = {forward_RELU, forward_TANH, forward_LSTM, forward_GRU};
static OfMode *const BACKWARD[] = {backward_RELU, backward_TANH, backward_LSTM, backward_GRU};

/* Lets threads pack the weights, and then compute all steps of their sequences. */
static void compute(Work *work, int backward, char *scratch, int threads) {
    const Call *call = work->call;
    int64_t multiplications = work->offsets[call->steps] * gates_of(call) * call->hidden * call->outputs;
    int64_t parts = least(least(threads, call->batch), 1 + multiplications / MULTIPLICATIONS);
    work->packed = (float *)scratch;
    work->packed_projection = work->packed + packed_weight(call, backward);
    work->zeros = work->packed_projection + packed_projection(call, backward);
    memset(work->zeros, 0, 4 * (size_t)(gates_of(call) * call->hidden));
#pragma omp parallel num_threads((int)parts)
    {
        int64_t part = omp_get_thread_num(), count = omp_get_num_threads();
        (backward ? pack_backward : pack_forward)(work, part, count);
#pragma omp barrier
        int64_t from = first_of_part(work, part, count), end = first_of_part(work, part + 1, count);
        OfMode *const *compute_part = backward ? BACKWARD : FORWARD;
        compute_part[call->mode](work, from, end);
    }
}

/* Writes the outputs of all steps, the last states, and what the backward takes: the gates over the products of the inputs,
   and `inner` and `squashed`, of which the first may be NULL for a GRU, and both are for an RNN. */
void recurrence_forward(const Call *call, const int64_t *offsets, const float *weight, const float *bias,
                        const float *projection, const float *first, const float *first_cells, float *gates, float *inner,
                        float *squashed, float *out, float *last, float *last_cells, char *scratch, int threads) {
    Work work = {.call = call, .offsets = offsets, .weight = weight, .bias = bias, .projection = projection, .first = first};
    work.first_cells = first_cells, work.gates = gates, work.inner = inner, work.squashed = squashed, work.out = out;
    work.last = last, work.last_cells = last_cells;
    compute(&work, 0, scratch, threads);
}

/* Writes the gradients of the gates before their activations, of what was projected, and the states before all steps.
   `of_state` and `of_cells` are the gradients of the last states, and become those of the first ones. */
void recurrence_backward(const Call *call, const int64_t *offsets, const float *weight, const float *projection,
                         const float *first, const float *first_cells, float *gates, float *inner, float *out,
                         const float *of_out, float *of_state, float *of_cells, float *of_gates, float *of_projected,
                         float *before, char *scratch, int threads) {
    Work work = {.call = call, .offsets = offsets, .weight = weight, .projection = projection, .first = first};
    work.first_cells = first_cells, work.gates = gates, work.inner = inner, work.out = out, work.of_out = of_out;
    work.of_state = of_state, work.of_cells = of_cells, work.of_gates = of_gates, work.of_projected = of_projected;
    work.before = before;
    compute(&work, 1, scratch, threads);
}
