/* Linear layers with norms, activations and dropouts between them, forward and backward, in fp32: one call for all.

   Rows depend on each other in batch norms and in the gradients of weights alone. So each thread takes some rows through
   the layers, and waits around batch norms, and before the gradients of all weights, of which threads share the columns. An
   element is summed in an order that does not depend on the number of threads. */
#include <stddef.h>

#include "denormals.h"
#include "fp32_functions.h"
#include "fp32_product.h"
#include "threads.h"

enum { NO_NORM, BATCH_NORM, LAYER_NORM };
enum { NONE, RELU, LEAKY_RELU, ELU, SIGMOID, TANH, SILU };

/* Numbers of a call: how far behind the beginning of its memory, below 0 somewhere else, and then where. */
typedef union {
    int64_t offset;
    float *numbers;
} Place;

/* A layer, and its tensors, most of which have a row for each one of the input. */
typedef struct {
    int64_t inputs, outputs, norm, activation;
    double eps, momentum;
    double slope;               /* of LeakyReLU below 0; of ELU, the limit below 0 */
    double scale;               /* of what the dropout keeps */
    Place sums;                 /* what is normalized: without a norm, the same memory as `kept` */
    Place mean, deviation;      /* of columns, or of rows for a layer norm; the second is 1 / √(variance + eps) */
    Place kept;                 /* by which the activation's slope is computed: its values or its arguments */
    Place out;                  /* the same memory, if it holds the values and there is no dropout between */
    Place of_normalized;        /* gradients behind a layer norm */
    Place of_sums;              /* gradients of the sums */
    const float *weight, *bias; /* the bias may be NULL */
    const float *norm_weight, *norm_bias;
    const float *mask;          /* of the dropout, or NULL */
    float *of_weight, *of_bias, *of_norm_weight, *of_norm_bias;
    float *running_mean, *running_variance; /* of a batch norm, or NULL */
} Layer;

typedef struct {
    int64_t rows, count;
    Layer layers[];
} Call;

/* A call and its tensors. `of_out` is the gradient of the last layer's output, and `of_in` may be NULL. */
typedef struct {
    int64_t rows, count;
    const Layer *layers;
    const float *in, *of_out;
    float *of_in;
} Chain;

/* A part of the work: some rows, and a share of what is divided otherwise. */
typedef struct {
    int64_t number, count, begin, end;
} Part;

/* ---------------------------------------------------------------------------------------------- activations */

INLINE Vector activated(const int kind, Vector x, float slope) {
    const Vector zero = {0};
    switch (kind) {
        case RELU: return CHOOSE(x <= 0.0f, zero, x); /* a NaN stays one */
        case LEAKY_RELU: return CHOOSE(x > 0.0f, x, x * slope);
        case ELU: return CHOOSE(x > 0.0f, x, exponential_less_1(CHOOSE(x > 0.0f, zero, x)) * slope);
        case SIGMOID: return sigmoid(x);
        case TANH: return hyperbolic_tangent(x);
        case SILU: return x * sigmoid(x);
        default: return x;
    }
}

/* The slope, by the value or, of the last one, by the argument. */
INLINE Vector slope_of(const int kind, Vector x, float slope) {
    const Vector zero = {0}, one = zero + 1.0f;
    switch (kind) {
        case RELU: return CHOOSE(x <= 0.0f, zero, one);
        case LEAKY_RELU: return CHOOSE(x > 0.0f, one, zero + slope);
        case ELU: return CHOOSE(x > 0.0f, one, x + slope);
        case SIGMOID: return x - x * x;
        case TANH: return 1.0f - x * x;
        case SILU: return sigmoid(x) * (1.0f + x * sigmoid(-x));
        default: return one;
    }
}

/* Whether the slope is computed by the value: else by the argument. */
INLINE int is_by_value(const int kind) { return kind < SILU; }

INLINE void activate_by(const int kind, const Layer *layer, int64_t from, int64_t end) {
    for (int64_t at = from; at < end; at += WIDTH) {
        int64_t count = end - at;
        Vector values = activated(kind, load(layer->kept.numbers + at, count), (float)layer->slope);
        if (is_by_value(kind) && layer->out.numbers != layer->kept.numbers) store(layer->kept.numbers + at, count, values);
        if (layer->mask) values *= load(layer->mask + at, count) * (float)layer->scale;
        store(layer->out.numbers + at, count, values);
    }
}

/* Multiplies gradients by the mask and the slope. */
INLINE void multiply_by_slope(const int kind, const Layer *layer, const float *of_out, float *to, int64_t from, int64_t end) {
    for (int64_t at = from; at < end; at += WIDTH) {
        int64_t count = end - at;
        Vector gradients = load(of_out + at, count);
        if (layer->mask) gradients *= load(layer->mask + at, count) * (float)layer->scale;
        gradients *= slope_of(kind, load(layer->kept.numbers + at, count), (float)layer->slope);
        store(to + at, count, gradients);
    }
}

#define OF_KIND(FUNCTION, ...)                                                                                         \
    switch (layer->activation) {                                                                                       \
        case RELU: FUNCTION(RELU, __VA_ARGS__); break;                                                                 \
        case LEAKY_RELU: FUNCTION(LEAKY_RELU, __VA_ARGS__); break;                                                     \
        case ELU: FUNCTION(ELU, __VA_ARGS__); break;                                                                   \
        case SIGMOID: FUNCTION(SIGMOID, __VA_ARGS__); break;                                                           \
        case TANH: FUNCTION(TANH, __VA_ARGS__); break;                                                                 \
        case SILU: FUNCTION(SILU, __VA_ARGS__); break;                                                                 \
        default: FUNCTION(NONE, __VA_ARGS__);                                                                          \
    }

/* ---------------------------------------------------------------------------------------------------- norms */

INLINE float sum_of(Vector numbers) {
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += numbers[i];
    return sum;
}

/* The numbers less what is not there: load fills a vector with zeros, which a difference to a mean would make others. */
INLINE Vector difference(const float *from, int64_t count, Vector mean) {
    float means[WIDTH];
    if (count >= WIDTH) return load(from, count) - mean;
    for (int i = 0; i < WIDTH; i++) means[i] = mean[i];
    return load(from, count) - load(means, count);
}

/* Sums over the rows of a vector of columns, in fp64: of numbers, of squared differences to a mean, or of products with
   normalized numbers. */
typedef double Doubles __attribute__((vector_size(8 * WIDTH)));
enum { OF_NUMBERS, OF_SQUARES, OF_PRODUCTS };
INLINE Vector sum_rows(const int kind, const Layer *layer, const float *numbers, int64_t rows, int64_t column, Vector mean) {
    int64_t columns = layer->outputs, count = columns - column;
    Doubles total = {0};
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * columns + column;
        Vector terms = load(numbers + at, count);
        if (kind == OF_SQUARES) {
            terms = (terms - mean) * (terms - mean);
        } else if (kind == OF_PRODUCTS) {
            Vector sums = load(layer->sums.numbers + at, count);
            terms *= layer->norm == BATCH_NORM ? (sums - mean) * load(layer->deviation.numbers + column, count)
                                               : (sums - layer->mean.numbers[row]) * layer->deviation.numbers[row];
        }
        total += __builtin_convertvector(terms, Doubles);
    }
    return __builtin_convertvector(total, Vector);
}

/* The columns of a part, in vectors. */
INLINE int64_t first_column(const Layer *layer, int64_t part, int64_t parts) {
    return least(layer->outputs, divided(layer->outputs, WIDTH) * part / parts * WIDTH);
}

static void batch_statistics(const Layer *layer, int64_t rows, const Part *part) {
    const Vector zero = {0};
    float momentum = (float)layer->momentum, number = (float)rows;
    int64_t end = first_column(layer, part->number + 1, part->count);
    for (int64_t at = first_column(layer, part->number, part->count); at < end; at += WIDTH) {
        int64_t count = layer->outputs - at;
        Vector mean = sum_rows(OF_NUMBERS, layer, layer->sums.numbers, rows, at, zero) / number;
        Vector squares = sum_rows(OF_SQUARES, layer, layer->sums.numbers, rows, at, mean);
        store(layer->mean.numbers + at, count, mean);
        for (int64_t i = 0; i < least(count, WIDTH); i++)
            layer->deviation.numbers[at + i] = 1.0f / __builtin_sqrtf(squares[i] / number + (float)layer->eps);
        if (!layer->running_mean) continue;
        float *running = layer->running_mean + at, *variances = layer->running_variance + at;
        store(running, count, load(running, count) * (1.0f - momentum) + mean * momentum);
        store(variances, count, load(variances, count) * (1.0f - momentum) + squares / (number - 1.0f) * momentum);
    }
}

static void normalize_rows(const Layer *layer, int64_t begin, int64_t end) {
    int64_t columns = layer->outputs;
    for (int64_t row = begin; row < end; row++) {
        const float *sums = layer->sums.numbers + row * columns;
        if (layer->norm == LAYER_NORM) {
            Vector total = {0}, squares = {0};
            for (int64_t at = 0; at < columns; at += WIDTH) total += load(sums + at, columns - at);
            float mean = sum_of(total) / (float)columns;
            for (int64_t at = 0; at < columns; at += WIDTH) {
                Vector far = difference(sums + at, columns - at, (Vector){0} + mean);
                squares += far * far;
            }
            layer->mean.numbers[row] = mean;
            layer->deviation.numbers[row] = 1.0f / __builtin_sqrtf(sum_of(squares) / (float)columns + (float)layer->eps);
        }
        for (int64_t at = 0; at < columns; at += WIDTH) {
            int64_t count = columns - at;
            Vector normalized = layer->norm == BATCH_NORM
                                    ? (load(sums + at, count) - load(layer->mean.numbers + at, count)) * load(layer->deviation.numbers + at, count)
                                    : (load(sums + at, count) - layer->mean.numbers[row]) * layer->deviation.numbers[row];
            Vector values = normalized * load(layer->norm_weight + at, count) + load(layer->norm_bias + at, count);
            store(layer->kept.numbers + row * columns + at, count, values);
        }
    }
}

/* The gradients of a norm's weight and bias, of some columns, from those of the normalized numbers. */
static void backward_norm(const Layer *layer, const float *of_normalized, int64_t rows, const Part *part) {
    const Vector zero = {0};
    int64_t end = first_column(layer, part->number + 1, part->count);
    for (int64_t at = first_column(layer, part->number, part->count); at < end; at += WIDTH) {
        int64_t count = layer->outputs - at;
        Vector mean = layer->norm == BATCH_NORM ? load(layer->mean.numbers + at, count) : zero;
        store(layer->of_norm_bias + at, count, sum_rows(OF_NUMBERS, layer, of_normalized, rows, at, zero));
        store(layer->of_norm_weight + at, count, sum_rows(OF_PRODUCTS, layer, of_normalized, rows, at, mean));
    }
}

/* The gradients of what a batch norm normalizes, in place of those of its result. */
static void backward_batch_norm(const Layer *layer, int64_t rows, int64_t begin, int64_t end) {
    int64_t columns = layer->outputs;
    for (int64_t row = begin; row < end; row++)
        for (int64_t at = 0; at < columns; at += WIDTH) {
            int64_t count = columns - at, place = row * columns + at;
            Vector deviation = load(layer->deviation.numbers + at, count);
            Vector normalized = (load(layer->sums.numbers + place, count) - load(layer->mean.numbers + at, count)) * deviation;
            Vector means = (load(layer->of_norm_bias + at, count) + normalized * load(layer->of_norm_weight + at, count)) / (float)rows;
            Vector gradients = load(layer->of_sums.numbers + place, count) - means;
            store(layer->of_sums.numbers + place, count, gradients * deviation * load(layer->norm_weight + at, count));
        }
}

static void backward_layer_norm(const Layer *layer, int64_t begin, int64_t end) {
    int64_t columns = layer->outputs;
    for (int64_t row = begin; row < end; row++) {
        const float *sums = layer->sums.numbers + row * columns, *of_normalized = layer->of_normalized.numbers + row * columns;
        float mean = layer->mean.numbers[row], deviation = layer->deviation.numbers[row];
        Vector total = {0}, products = {0};
        for (int64_t at = 0; at < columns; at += WIDTH) {
            int64_t count = columns - at;
            Vector gradients = load(of_normalized + at, count) * load(layer->norm_weight + at, count);
            total += gradients, products += gradients * (load(sums + at, count) - mean) * deviation;
        }
        float of_mean = sum_of(total) / (float)columns, of_product = sum_of(products) / (float)columns;
        for (int64_t at = 0; at < columns; at += WIDTH) {
            int64_t count = columns - at;
            Vector gradients = load(of_normalized + at, count) * load(layer->norm_weight + at, count);
            Vector normalized = (load(sums + at, count) - mean) * deviation;
            store(layer->of_sums.numbers + row * columns + at, count, (gradients - of_mean - normalized * of_product) * deviation);
        }
    }
}

/* --------------------------------------------------------------------------------------------------- phases */

/* What a layer multiplies: the input, or the output of the one before. */
INLINE const float *inputs_of(const Chain *chain, int64_t at) { return at ? chain->layers[at - 1].out.numbers : chain->in; }

static void forward_part(const Chain *chain, const Part *part) {
    for (int64_t at = 0; at < chain->count; at++) {
        const Layer *layer = &chain->layers[at];
        Shape shape = {chain->rows, layer->outputs, layer->inputs, layer->inputs, 1, 1, layer->inputs};
        Work work = {&shape, inputs_of(chain, at), layer->weight, layer->bias, layer->sums.numbers};
        multiply(&work, part->begin, part->end, 0, layer->outputs);
        if (layer->norm == BATCH_NORM) {
#pragma omp barrier
            batch_statistics(layer, chain->rows, part);
#pragma omp barrier
        }
        if (layer->norm) normalize_rows(layer, part->begin, part->end);
        if (layer->activation != NONE || layer->out.numbers != layer->kept.numbers || layer->mask)
            OF_KIND(activate_by, layer, part->begin * layer->outputs, part->end * layer->outputs)
    }
}

/* The gradients of all sums. Those of the last layer are what the backward begins with, if nothing is behind its sums. */
static void backward_part(const Chain *chain, const Part *part) {
    for (int64_t at = chain->count - 1; at >= 0; at--) {
        const Layer *layer = &chain->layers[at];
        const float *of_out = at == chain->count - 1 ? chain->of_out : layer->of_sums.numbers;
        float *to = layer->norm == LAYER_NORM ? layer->of_normalized.numbers : layer->of_sums.numbers;
        if (of_out != to || layer->activation != NONE || layer->mask)
            OF_KIND(multiply_by_slope, layer, of_out, to, part->begin * layer->outputs, part->end * layer->outputs)
        if (layer->norm == BATCH_NORM) {
#pragma omp barrier
            backward_norm(layer, layer->of_sums.numbers, chain->rows, part);
#pragma omp barrier
            backward_batch_norm(layer, chain->rows, part->begin, part->end);
        } else if (layer->norm == LAYER_NORM) {
            backward_layer_norm(layer, part->begin, part->end);
        }
        float *of_in = at ? chain->layers[at - 1].of_sums.numbers : chain->of_in;
        if (!of_in) continue;
        Shape shape = {chain->rows, layer->inputs, layer->outputs, layer->outputs, 1, layer->inputs, 1};
        Work work = {&shape, layer->of_sums.numbers, layer->weight, NULL, of_in};
        multiply(&work, part->begin, part->end, 0, layer->inputs);
    }
}

/* A part of the gradients of all weights and biases: of rows of the weights, or of columns where the rows are few. */
static void backward_weights(const Chain *chain, const Part *part) {
    int64_t number = part->number, parts = part->count;
    for (int64_t at = 0; at < chain->count; at++) {
        const Layer *layer = &chain->layers[at];
        Shape shape = {layer->outputs, layer->inputs, chain->rows, 1, layer->outputs, layer->inputs, 1};
        Work work = {&shape, layer->of_sums.numbers, inputs_of(chain, at), NULL, layer->of_weight};
        int64_t groups = divided(layer->outputs, ROWS), tiles = divided(layer->inputs, TILE);
        if (groups >= parts || groups >= tiles)
            multiply(&work, groups * number / parts * ROWS, least(layer->outputs, groups * (number + 1) / parts * ROWS), 0,
                     layer->inputs);
        else
            multiply(&work, 0, layer->outputs, tiles * number / parts * TILE,
                     least(layer->inputs, tiles * (number + 1) / parts * TILE));
        int64_t end = first_column(layer, number + 1, parts);
        const Vector zero = {0};
        for (int64_t column = first_column(layer, number, parts); layer->of_bias && column < end; column += WIDTH)
            store(layer->of_bias + column, layer->outputs - column,
                  sum_rows(OF_NUMBERS, layer, layer->of_sums.numbers, chain->rows, column, zero));
        if (layer->norm == LAYER_NORM) backward_norm(layer, layer->of_normalized.numbers, chain->rows, part);
    }
}

/* ---------------------------------------------------------------------------------------------------- calls */

static int parts_of(const Chain *chain, int threads) {
    int64_t multiplications = 0;
    for (int64_t at = 0; at < chain->count; at++)
        multiplications += chain->rows * chain->layers[at].inputs * chain->layers[at].outputs;
    return (int)least(least(threads, divided(chain->rows, ROWS)), 1 + multiplications / MULTIPLICATIONS);
}

/* The part of this thread. Rows are divided in groups that are multiplied at a time. */
INLINE Part part_of_thread(const Chain *chain) {
    int64_t number = omp_get_thread_num(), count = omp_get_num_threads(), groups = divided(chain->rows, ROWS);
    return (Part){number, count, groups * number / count * ROWS, least(chain->rows, groups * (number + 1) / count * ROWS)};
}

INLINE void put(Place *place, float *memory, float *elsewhere) {
    place->numbers = place->offset < 0 ? elsewhere : memory + place->offset;
}

/* Puts what is kept of the layers in `memory`, or in `out`. */
static void put_all(Call *call, float *memory, float *out) {
    for (int64_t at = 0; at < call->count; at++) {
        Layer *layer = &call->layers[at];
        Place *const places[] = {&layer->sums, &layer->mean, &layer->deviation, &layer->kept, &layer->out};
        for (int i = 0; i < 5; i++) put(places[i], memory, out);
    }
}

void chain_forward(Call *call, const float *in, float *memory, float *out, int threads) {
    put_all(call, memory, out);
    const Chain chain = {call->rows, call->count, call->layers, in, NULL, NULL};
#pragma omp parallel num_threads(parts_of(&chain, threads))
    {
        Part part = part_of_thread(&chain);
        forward_part(&chain, &part);
    }
}

/* The gradients of sums are put in `sums`, or are those of the output. */
void chain_backward(Call *call, const float *in, float *memory, float *out, float *of_out, float *sums, float *of_in,
                    int threads) {
    put_all(call, memory, out);
    for (int64_t at = 0; at < call->count; at++) {
        put(&call->layers[at].of_sums, sums, of_out);
        put(&call->layers[at].of_normalized, sums, NULL);
    }
    const Chain chain = {call->rows, call->count, call->layers, in, of_out, of_in};
#pragma omp parallel num_threads(parts_of(&chain, threads))
    {
        Part part = part_of_thread(&chain);
        unsigned state = flush_denormals(1);
        backward_part(&chain, &part);
#pragma omp barrier
        backward_weights(&chain, &part);
        restore(state);
    }
}
