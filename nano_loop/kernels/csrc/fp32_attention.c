/* Attention of fp32 tensors, softmax(query keyᵀ · scale + mask) value, and its gradients.

   A thread computes whole heads. It packs keys and values once, and computes some rows of scores at a time, which stay
   in the cache. The backward recomputes them with the sum of each row: in fp32, a large log-sum-exp loses it. */
#include "attention_call.h"
#include "exponential.h"
#include "fp32_tiles.h"
#include "logarithm.h"
#include "threads.h"

#define BLOCK (8 * ROWS) /* rows of scores that are computed at a time */
#define LOWEST (-__builtin_inff())

/* A packed matrix: tiles of columns, for each depth index. */
typedef struct {
    const float *tiles;
    int64_t columns, depth;
} Packed;

INLINE int64_t padded(int64_t count) { return up_to(count, WIDTH); }
INLINE Vector at(const float *from) { return *(const Unaligned *)from; }
INLINE void put(float *to, Vector numbers) { *(Unaligned *)to = numbers; }

INLINE float sum_of(Vector numbers) {
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += numbers[i];
    return sum;
}

static Packed pack(const float *b, int64_t b_step, int64_t b_column, int64_t columns, int64_t depth, float *to) {
    for (int64_t column = 0; column < columns; column += TILE) {
        int64_t width = vectors_at(column, columns) * WIDTH;
        pack_tile(b + column * b_column, b_step, b_column, columns - column, depth, width, to + column * depth);
    }
    return (Packed){to, columns, depth};
}

/* Writes a b, or adds it to `out`, for some rows and depths of a, and all tiles that contain one of the columns. */
static void multiply(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step,
                     const Packed *b, float *out, int64_t out_row, int is_added) {
    const float *from[ROWS];
    float sums[ROWS * TILE] __attribute__((aligned(64)));
    for (int64_t column = 0; column < columns; column += TILE) {
        int64_t vectors = vectors_at(column, b->columns), width = vectors * WIDTH;
        for (int64_t row = 0; row < rows; row += ROWS) {
            int64_t count = least(ROWS, rows - row);
            for (int64_t i = 0; i < count; i++) from[i] = a + (row + i) * a_row;
            IN_FP32[vectors - 1](count, depth, from, a_step, b->tiles + column * b->depth, width, sums);
            for (int64_t i = 0; i < count; i++)
                for (int64_t j = 0; j < width; j += WIDTH) {
                    float *to = out + (row + i) * out_row + column + j;
                    put(to, is_added ? at(to) + at(sums + i * TILE + j) : at(sums + i * TILE + j));
                }
        }
    }
}

static void store_rows(const float *from, int64_t rows, int64_t size, float *to, int64_t to_row) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < size; j += WIDTH) store(to + i * to_row + j, size - j, at(from + i * padded(size) + j));
}

/* The number of keys visible to some rows. */
INLINE int64_t keys_of(const Call *call, int64_t row, int64_t rows) {
    return call->causal ? least(call->keys, row + rows) : call->keys;
}

/* Computes the scores of some rows. Masked scores after a row's last visible key are set to the minimum. */
static void score(const Call *call, const float *query, const Packed *keys, const float *mask, int64_t row, int64_t rows,
                  float *scores) {
    int64_t seen = keys_of(call, row, rows), width = padded(call->keys);
    multiply(rows, seen, call->width, query + row * call->query[2], call->query[2], 1, keys, scores, width, 0);
    for (int64_t i = 0; i < rows; i++) {
        int64_t last = keys_of(call, row + i, 1);
        const float *of_row = mask ? mask + (row + i) * call->mask[2] : 0;
        for (int64_t j = 0; j < padded(seen); j += WIDTH) {
            float *to = scores + i * width + j;
            Vector numbers = at(to) * (float)call->scale;
            for (int k = 0; mask && call->mask[3] != 1 && k < WIDTH && j + k < last; k++)
                numbers[k] += of_row[(j + k) * call->mask[3]];
            if (mask && call->mask[3] == 1 && j < last) numbers += load(of_row + j, last - j);
            for (int k = 0; j + WIDTH > last && k < WIDTH; k++)
                if (j + k >= last) numbers[k] = LOWEST;
            put(to, numbers);
        }
    }
}

/* Replaces a row of scores by exponentials, the largest of which is 1, returns their sum, and writes the largest score.
   If no key is visible, all are 0. */
INLINE float exponentials(float *scores, int64_t count, float *largest_score) {
    Vector largest = (Vector){0} + LOWEST, total = {0};
    for (int64_t j = 0; j < count; j += WIDTH) largest = CHOOSE(at(scores + j) > largest, at(scores + j), largest);
    float most_of_row = LOWEST;
    for (int i = 0; i < WIDTH; i++) most_of_row = largest[i] > most_of_row ? largest[i] : most_of_row;
    if (most_of_row == LOWEST) most_of_row = 0;
    for (int64_t j = 0; j < count; j += WIDTH) {
        Vector numbers = exponential(at(scores + j) - most_of_row);
        put(scores + j, numbers);
        total += numbers;
    }
    *largest_score = most_of_row;
    return sum_of(total);
}

/* The number of floats that a thread needs. */
static int64_t numbers_of(const Call *call, int backward) {
    int64_t keys = padded(call->keys), size = padded(call->width);
    if (!backward) return call->width * keys + call->keys * size + BLOCK * (keys + size);
    return 2 * call->width * keys + 3 * call->keys * size + BLOCK * (2 * keys + 3 * size);
}

/* The number of bytes that a thread of a call needs. */
int64_t fp32_attention_bytes(const Call *call, int backward) { return 4 * numbers_of(call, backward); }

INLINE int64_t place(const int64_t *strides, int64_t batch, int64_t head) {
    return batch * strides[0] + head * strides[1];
}

static void forward_of_head(const Call *call, int64_t batch, int64_t head, const float *query, const float *key,
                            const float *value, const float *mask, float *out, float *log_sums, float *own) {
    int64_t width = padded(call->keys), size = padded(call->width);
    float *scores = own + call->width * width + call->keys * size, *sums = scores + BLOCK * width;
    Packed keys = pack(key + place(call->key, batch, head), 1, call->key[2], call->keys, call->width, own);
    Packed values = pack(value + place(call->value, batch, head), call->value[2], 1, call->width, call->keys,
                         own + call->width * width);
    query += place(call->query, batch, head), out += place(call->out, batch, head);
    mask = mask ? mask + place(call->mask, batch, head) : 0;
    for (int64_t row = 0; row < call->length; row += BLOCK) {
        int64_t rows = least(BLOCK, call->length - row), seen = keys_of(call, row, rows);
        float totals[BLOCK];
        score(call, query, &keys, mask, row, rows, scores);
        for (int64_t i = 0; i < rows; i++) {
            float largest, sum = totals[i] = exponentials(scores + i * width, padded(seen), &largest);
            log_sums[(batch * call->heads + head) * call->length + row + i] =
                sum == 0 ? 0 : largest + (float)logarithm(sum); /* 0 as in torch */
        }
        multiply(rows, call->width, seen, scores, width, 1, &values, sums, size, 0);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < size; j += WIDTH)
                put(sums + i * size + j, at(sums + i * size + j) * (totals[i] == 0 ? 0 : 1 / totals[i]));
        store_rows(sums, rows, call->width, out + row * call->out[2], call->out[2]);
    }
}

static void backward_of_head(const Call *call, int64_t batch, int64_t head, const float *of_out, const float *query,
                             const float *key, const float *value, const float *mask, float *of_query, float *of_key,
                             float *of_value, float *own) {
    int64_t width = padded(call->keys), size = padded(call->width), of_keys = call->keys * size;
    float *next = own;
    key += place(call->key, batch, head), value += place(call->value, batch, head);
    Packed keys = pack(key, 1, call->key[2], call->keys, call->width, next);
    Packed values = pack(value, 1, call->value[2], call->keys, call->width, next += call->width * width);
    Packed rows_of_keys = pack(key, call->key[2], 1, call->width, call->keys, next += call->width * width);
    float *key_sums = next += of_keys, *value_sums = next += of_keys, *shares = next += of_keys;
    float *slopes = next += BLOCK * width, *sums = next += BLOCK * width;
    float *packed_query = next += BLOCK * size, *packed_out = next += BLOCK * size;
    memset(key_sums, 0, 8 * (size_t)of_keys);
    query += place(call->query, batch, head), of_out += place(call->of_out, batch, head);
    of_query += place(call->of_query, batch, head);
    mask = mask ? mask + place(call->mask, batch, head) : 0;
    for (int64_t row = 0; row < call->length; row += BLOCK) {
        int64_t rows = least(BLOCK, call->length - row), seen = keys_of(call, row, rows);
        const float *of_rows = of_out + row * call->of_out[2];
        score(call, query, &keys, mask, row, rows, shares);
        multiply(rows, seen, call->width, of_rows, call->of_out[2], 1, &values, slopes, width, 0);
        for (int64_t i = 0; i < rows; i++) {
            float *share = shares + i * width, *slope = slopes + i * width;
            float largest, sum = exponentials(share, padded(seen), &largest), by_sum = sum == 0 ? 0 : 1 / sum;
            Vector products = {0};
            for (int64_t j = 0; j < padded(seen); j += WIDTH) {
                put(share + j, at(share + j) * by_sum);
                products += at(share + j) * at(slope + j);
            }
            float mean = sum_of(products);
            for (int64_t j = 0; j < padded(seen); j += WIDTH)
                put(slope + j, at(share + j) * (at(slope + j) - mean) * (float)call->scale);
        }
        multiply(rows, call->width, seen, slopes, width, 1, &rows_of_keys, sums, size, 0);
        store_rows(sums, rows, call->width, of_query + row * call->of_query[2], call->of_query[2]);
        Packed queries = pack(query + row * call->query[2], call->query[2], 1, call->width, rows, packed_query);
        Packed outs = pack(of_rows, call->of_out[2], 1, call->width, rows, packed_out);
        multiply(seen, call->width, rows, slopes, 1, width, &queries, key_sums, size, 1);
        multiply(seen, call->width, rows, shares, 1, width, &outs, value_sums, size, 1);
    }
    store_rows(key_sums, call->keys, call->width, of_key + place(call->of_key, batch, head), call->of_key[2]);
    store_rows(value_sums, call->keys, call->width, of_value + place(call->of_value, batch, head), call->of_value[2]);
}

/* The arguments are as in attention.c, but without dropout, and with as many key heads as query heads.

   Writes `out`, and the log-sum-exp of each row into `log_sums`, of shape (batch, head, row). */
void fp32_attention_forward(const Call *call, const float *query, const float *key, const float *value, const float *mask,
                            const uint8_t *kept, float *out, float *log_sums, float *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t head = 0; head < call->batch * call->heads; head++)
        forward_of_head(call, head / call->heads, head % call->heads, query, key, value, mask, out, log_sums,
                        scratch + omp_get_thread_num() * numbers_of(call, 0));
}

/* Writes the gradients of query, key and value. The log-sum-exps are not used. */
void fp32_attention_backward(const Call *call, const float *query, const float *key, const float *value,
                             const float *mask, const uint8_t *kept, const float *of_out, const float *log_sums,
                             float *of_query, float *of_key, float *of_value, float *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t head = 0; head < call->batch * call->heads; head++)
        backward_of_head(call, head / call->heads, head % call->heads, of_out, query, key, value, mask,
                         of_query, of_key, of_value, scratch + omp_get_thread_num() * numbers_of(call, 1));
}
