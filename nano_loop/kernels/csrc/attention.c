/* Attention in blocks, by the bf16 instructions of AVX-512 or by AMX: softmax(query keyᵀ · scale + mask) value, and its
   gradients.

   For each head, the scores of a block of rows are computed, normalized and multiplied while they are in the cache. The
   backward recomputes them from the log-sum-exps saved by the forward, as in Dao et al. ("FlashAttention", 2022), so
   nothing of the size of the scores is stored except a dropout mask. Products have bf16 factors and fp32 sums;
   everything else is in fp32.

   Each head is computed by one thread, so results do not depend on the number of threads. */
#include <stdint.h>
#include <string.h>

#include "attention_call.h"
#include "avx512_bf16.h"

#ifdef HAS_AVX512_BF16
#include "exponential.h"
#include "logarithm.h"
#include "tiles.h"

#define ROWS 64 /* rows of a block; must be even */
#define LARGE 4096.0f /* next to a value of this size, fp32 represents the logarithm of a sum to 2^-12 */

/* ------------------------------------------------------------------------------------------------- softmax */

/* The data that is read along with a row of scores. */
typedef struct {
    const Call *call;
    const void *mask;    /* of this row, or NULL */
    const uint8_t *kept; /* the dropout mask, or NULL */
    int64_t columns;     /* those visible to a causal row */
} Row;

INLINE __m512 with_mask(const Row *row, __m512 scores, int64_t at) {
    const Call *call = row->call;
    __mmask16 here = first(row->columns - at);
    __m512 found = _mm512_mul_ps(scores, _mm512_set1_ps((float)call->scale));
    const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
    if (row->mask) {
        int64_t step = call->mask[3];
        if (call->mask_kind == 1) {
            const uint8_t *bytes = (const uint8_t *)row->mask + at * step;
            __mmask16 open = step ? _mm_test_epi8_mask(_mm_maskz_loadu_epi8(here, bytes), _mm_set1_epi8(-1))
                                  : (*bytes ? 0xffff : 0);
            found = _mm512_mask_add_ps(found, (__mmask16)~open, found, nothing); /* as torch, which preserves NaN */
        } else if (call->mask_kind == 3) {
            const float *numbers = (const float *)row->mask + at * step;
            found = _mm512_add_ps(found, step ? _mm512_maskz_loadu_ps(here, numbers) : _mm512_set1_ps(*numbers));
        } else {
            const uint16_t *numbers = (const uint16_t *)row->mask + at * step;
            __m512i bits = step ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, numbers))
                                : _mm512_set1_epi32(*numbers);
            found = _mm512_add_ps(found, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
        }
    }
    return _mm512_mask_mov_ps(nothing, here, found);
}

/* 1 / (1 - dropout_p) where the dropout mask is set, otherwise 0. */
INLINE __m512 factor(const Row *row, int64_t at, __m512 by_kept) {
    __m128i bytes = _mm_maskz_loadu_epi8(first(row->columns - at), row->kept + at);
    return _mm512_maskz_mov_ps(_mm_test_epi8_mask(bytes, bytes), by_kept);
}

INLINE __m256i rounded(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }

/* Replaces a row of scores by exponentials in bf16, and returns the logarithm of their sum. They are not divided by the
   sum, so the largest is exactly 1; `by_sum` is the remaining factor. Exponentials are zero-padded to a multiple of 16
   columns. */
static float normalize(const Row *row, float *scores, uint16_t *exponentials, float *by_sum) {
    int64_t end = up_to(row->columns, 16);
    __m512 most = _mm512_set1_ps(-__builtin_inff()), total = _mm512_setzero_ps();
    for (int64_t at = 0; at < end; at += 16) {
        __m512 found = with_mask(row, _mm512_loadu_ps(scores + at), at);
        _mm512_storeu_ps(scores + at, found);
        most = _mm512_max_ps(most, found);
    }
    float maximum = _mm512_reduce_max_ps(most);
    if (maximum == -__builtin_inff()) maximum = 0; /* all are masked: the sum becomes 0 */
    for (int64_t at = 0; at < end; at += 16) {
        __m512 found = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + at), _mm512_set1_ps(maximum)));
        total = _mm512_add_ps(total, found);
        if (row->kept) found = _mm512_mul_ps(found, factor(row, at, _mm512_set1_ps(1.0f)));
        _mm256_storeu_si256((__m256i *)(exponentials + at), rounded(found));
    }
    float sum = _mm512_reduce_add_ps(total), kept = (float)row->call->kept;
    *by_sum = sum == 0 || kept == 0 ? 0.0f : 1.0f / (sum * kept);
    return sum == 0 ? __builtin_inff() : maximum + (float)logarithm(sum);
}

/* Returns 1 / the sum of a row's exponentials, and writes the maximum, which is subtracted from the scores. */
static float by_sum_of(const Row *row, const float *scores, float *maximum) {
    int64_t end = up_to(row->columns, 16);
    __m512 most = _mm512_set1_ps(-__builtin_inff()), total = _mm512_setzero_ps();
    for (int64_t at = 0; at < end; at += 16)
        most = _mm512_max_ps(most, with_mask(row, _mm512_loadu_ps(scores + at), at));
    *maximum = _mm512_reduce_max_ps(most);
    most = _mm512_set1_ps(*maximum);
    for (int64_t at = 0; at < end; at += 16)
        total = _mm512_add_ps(
            total, exponential(_mm512_sub_ps(with_mask(row, _mm512_loadu_ps(scores + at), at), most)));
    return 1.0f / _mm512_reduce_add_ps(total);
}

/* The gradients of the scores, from the scores and from the gradients of the probabilities. Overwrites the scores by
   the probabilities after dropout, and the latter by the gradients. The saved log-sum-exp has lost the sum if the
   maximum is large, as for a row masked by -1e9: then both are recomputed. */
static void differentiate(const Row *row, float log_sum, float *scores, float *gradients) {
    int64_t end = up_to(row->columns, 16);
    float by_sum = 1, size = __builtin_fabsf(log_sum);
    if (size > LARGE && size < __builtin_inff()) by_sum = by_sum_of(row, scores, &log_sum);
    __m512 by_kept = _mm512_set1_ps((float)(row->call->kept > 0 ? 1 / row->call->kept : 0));
    __m512 total = _mm512_setzero_ps();
    for (int64_t at = 0; at < end; at += 16) {
        __m512 shifted = _mm512_sub_ps(with_mask(row, _mm512_loadu_ps(scores + at), at), _mm512_set1_ps(log_sum));
        __m512 found = _mm512_mul_ps(exponential(shifted), _mm512_set1_ps(by_sum));
        __m512 of_found = _mm512_loadu_ps(gradients + at);
        if (row->kept) of_found = _mm512_mul_ps(of_found, factor(row, at, by_kept));
        of_found = _mm512_maskz_mov_ps(first(row->columns - at), of_found);
        total = _mm512_fmadd_ps(found, of_found, total);
        _mm512_storeu_ps(scores + at, found);
        _mm512_storeu_ps(gradients + at, of_found);
    }
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(total));
    for (int64_t at = 0; at < end; at += 16) {
        __m512 found = _mm512_loadu_ps(scores + at);
        __m512 of_score = _mm512_mul_ps(found, _mm512_sub_ps(_mm512_loadu_ps(gradients + at), mean));
        _mm512_storeu_ps(gradients + at, of_score);
        if (row->kept) _mm512_storeu_ps(scores + at, _mm512_mul_ps(found, factor(row, at, by_kept)));
    }
}

/* ---------------------------------------------------------------------------------------------- whole heads */

/* Writes rows at an offset, scaled by one number or by one number per row in `of_rows`. */
INLINE void store(const float *from, int64_t from_row, int64_t rows, int64_t width, float scale, const float *of_rows,
                  int64_t is_wide, void *to, int64_t offset, int64_t row) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t at = 0; at < width; at += 16) {
            __m512 by = _mm512_set1_ps(of_rows ? of_rows[i] : scale);
            __m512 found = _mm512_mul_ps(_mm512_loadu_ps(from + i * from_row + at), by);
            int64_t place = offset + i * row + at;
            if (is_wide) _mm512_mask_storeu_ps((float *)to + place, first(width - at), found);
            else _mm256_mask_storeu_epi16((uint16_t *)to + place, first(width - at), rounded(found));
        }
}

/* The parts of a thread's memory, with sizes in multiples of 64 bytes. */
typedef struct {
    uint32_t *keys_transposed, *values_transposed, *keys_paired, *values_paired, *queries_paired, *outs_paired;
    uint32_t *probabilities_paired, *gradients_paired;
    uint16_t *probabilities; /* row-major, not divided by their sum; in the backward, the gradients of the scores */
    float *scores, *gradients, *result, *of_keys, *of_values;
    int64_t bytes;
} Memory;

static Memory memory_of(const Call *call, char *at, int backward) {
    Memory found;
    memset(&found, 0, sizeof found);
    char *start = at;
    int64_t keys = up_to(call->keys, TILE), pairs = divided(call->keys, 2);
    int64_t width = up_to(call->width, TILE), value_width = up_to(call->value_width, TILE);
#define PART(NAME, TYPE, COUNT) found.NAME = (TYPE *)at, at += up_to((COUNT) * (int64_t)sizeof(TYPE), 64)
    PART(keys_transposed, uint32_t, call->width / 2 * keys);
    PART(scores, float, ROWS * keys);
    PART(probabilities, uint16_t, ROWS * keys);
    PART(result, float, ROWS * most(width, value_width));
    if (!backward) {
        PART(values_paired, uint32_t, pairs * value_width);
    } else {
        PART(values_transposed, uint32_t, call->value_width / 2 * keys);
        PART(keys_paired, uint32_t, pairs * width);
        PART(queries_paired, uint32_t, ROWS / 2 * width);
        PART(outs_paired, uint32_t, ROWS / 2 * value_width);
        PART(probabilities_paired, uint32_t, ROWS / 2 * keys);
        PART(gradients_paired, uint32_t, ROWS / 2 * keys);
        PART(gradients, float, ROWS * keys);
        PART(of_keys, float, keys * width);
        PART(of_values, float, keys * value_width);
    }
#undef PART
    found.bytes = at - start;
    return found;
}

INLINE Row row_of(const Call *call, const void *mask, const uint8_t *kept, int64_t batch, int64_t head, int64_t at,
                  int64_t columns) {
    Row row = {call, 0, 0, call->causal ? least(columns, at + 1) : columns};
    int64_t place = batch * call->mask[0] + head * call->mask[1] + at * call->mask[2];
    const int sizes[] = {0, 1, 2, 4};
    if (call->mask_kind) row.mask = (const char *)mask + place * sizes[call->mask_kind];
    if (kept) row.kept = kept + ((batch * call->heads * call->group + head) * call->length + at) * call->keys;
    return row;
}

/* Zeroes the masked part of a causal row, up to the last column of its block. */
INLINE void clear(uint16_t *row, int64_t from, int64_t to) {
    if (to > from) memset(row + from, 0, (to - from) * sizeof *row);
}

static void forward_of_head(const Call *call, const uint16_t *query, const uint16_t *key, const uint16_t *value,
                            const void *mask, const uint8_t *kept, void *out, float *log_sums, char *scratch,
                            int64_t batch, int64_t key_head) {
    Memory memory = memory_of(call, scratch, 0);
    int64_t keys = up_to(call->keys, TILE), pairs = divided(call->keys, 2), wide = up_to(call->value_width, TILE);
    pack_transposed(key + batch * call->key[0] + key_head * call->key[1], call->key[2], call->keys, call->width,
                    memory.keys_transposed);
    pack_pairs(value + batch * call->value[0] + key_head * call->value[1], call->value[2], call->keys,
               call->value_width, memory.values_paired);
    for (int64_t head = key_head * call->group; head < (key_head + 1) * call->group; head++)
        for (int64_t at = 0; at < call->length; at += ROWS) {
            int64_t rows = least(ROWS, call->length - at);
            int64_t columns = call->causal ? least(call->keys, at + rows) : call->keys, end = up_to(columns, 16);
            float by_sums[ROWS];
            product(call->by_tiles, rows, columns, call->width / 2,
                    query + batch * call->query[0] + head * call->query[1] + at * call->query[2], 2 * call->query[2],
                    4, memory.keys_transposed, call->width / 2, memory.scores, keys, 0);
            for (int64_t i = 0; i < rows; i++) {
                Row row = row_of(call, mask, kept, batch, head, at + i, columns);
                uint16_t *probabilities = memory.probabilities + i * keys;
                float log_sum = normalize(&row, memory.scores + i * keys, probabilities, by_sums + i);
                log_sums[(batch * call->heads * call->group + head) * call->length + at + i] = log_sum;
                clear(probabilities, up_to(row.columns, 16), end);
            }
            product(call->by_tiles, rows, call->value_width, divided(columns, 2), memory.probabilities, 2 * keys, 4,
                    memory.values_paired, pairs, memory.result, wide, 0);
            store(memory.result, wide, rows, call->value_width, 1.0f, by_sums, call->is_wide, out,
                  batch * call->out[0] + head * call->out[1] + at * call->out[2], call->out[2]);
        }
}

static void backward_of_head(const Call *call, const uint16_t *query, const uint16_t *key, const uint16_t *value,
                             const void *mask, const uint8_t *kept, const uint16_t *of_out, const float *log_sums,
                             void *of_query, void *of_key, void *of_value, char *scratch, int64_t batch,
                             int64_t key_head) {
    Memory memory = memory_of(call, scratch, 1);
    int64_t keys = up_to(call->keys, TILE), pairs = divided(call->keys, 2);
    int64_t width = up_to(call->width, TILE), value_width = up_to(call->value_width, TILE);
    const uint16_t *of_head = key + batch * call->key[0] + key_head * call->key[1];
    pack_transposed(of_head, call->key[2], call->keys, call->width, memory.keys_transposed);
    pack_pairs(of_head, call->key[2], call->keys, call->width, memory.keys_paired);
    pack_transposed(value + batch * call->value[0] + key_head * call->value[1], call->value[2], call->keys,
                    call->value_width, memory.values_transposed);
    memset(memory.of_keys, 0, call->keys * width * sizeof(float));
    memset(memory.of_values, 0, call->keys * value_width * sizeof(float));
    for (int64_t head = key_head * call->group; head < (key_head + 1) * call->group; head++)
        for (int64_t at = 0; at < call->length; at += ROWS) {
            int64_t rows = least(ROWS, call->length - at), both = divided(rows, 2);
            int64_t columns = call->causal ? least(call->keys, at + rows) : call->keys, end = up_to(columns, 16);
            const uint16_t *q = query + batch * call->query[0] + head * call->query[1] + at * call->query[2];
            const uint16_t *g = of_out + batch * call->of_out[0] + head * call->of_out[1] + at * call->of_out[2];
            product(call->by_tiles, rows, columns, call->width / 2, q, 2 * call->query[2], 4, memory.keys_transposed, call->width / 2,
                    memory.scores, keys, 0);
            product(call->by_tiles, rows, columns, call->value_width / 2, g, 2 * call->of_out[2], 4, memory.values_transposed,
                    call->value_width / 2, memory.gradients, keys, 0);
            for (int64_t i = 0; i < rows; i++) {
                Row row = row_of(call, mask, kept, batch, head, at + i, columns);
                float *scores = memory.scores + i * keys, *gradients = memory.gradients + i * keys;
                int64_t done = up_to(row.columns, 16);
                float log_sum = log_sums[(batch * call->heads * call->group + head) * call->length + at + i];
                differentiate(&row, log_sum, scores, gradients);
                if (end > done) {
                    memset(scores + done, 0, (end - done) * sizeof(float));
                    memset(gradients + done, 0, (end - done) * sizeof(float));
                }
            }
            if (rows % 2) { /* zero the missing second row of the last pair */
                memset(memory.scores + rows * keys, 0, end * sizeof(float));
                memset(memory.gradients + rows * keys, 0, end * sizeof(float));
            }
            for (int64_t pair = 0; pair < both; pair++)
                for (int64_t column = 0; column < end; column += 16) {
                    const float *scores = memory.scores + 2 * pair * keys + column;
                    const float *gradients = memory.gradients + 2 * pair * keys + column;
                    uint16_t *plain = memory.probabilities + 2 * pair * keys + column;
                    __m256i low = rounded(_mm512_loadu_ps(gradients)), high = rounded(_mm512_loadu_ps(gradients + keys));
                    _mm256_storeu_si256((__m256i *)plain, low);
                    _mm256_storeu_si256((__m256i *)(plain + keys), high);
                    _mm512_storeu_si512(memory.gradients_paired + pair * keys + column, paired(low, high));
                    low = rounded(_mm512_loadu_ps(scores)), high = rounded(_mm512_loadu_ps(scores + keys));
                    _mm512_storeu_si512(memory.probabilities_paired + pair * keys + column, paired(low, high));
                }
            pack_pairs(q, call->query[2], rows, call->width, memory.queries_paired);
            pack_pairs(g, call->of_out[2], rows, call->value_width, memory.outs_paired);
            product(call->by_tiles, columns, call->value_width, both, memory.probabilities_paired, 4, 4 * keys, memory.outs_paired,
                    both, memory.of_values, value_width, 1);
            product(call->by_tiles, columns, call->width, both, memory.gradients_paired, 4, 4 * keys, memory.queries_paired, both,
                    memory.of_keys, width, 1);
            product(call->by_tiles, rows, call->width, divided(columns, 2), memory.probabilities, 2 * keys, 4, memory.keys_paired, pairs,
                    memory.result, width, 0);
            store(memory.result, width, rows, call->width, (float)call->scale, 0, call->is_wide, of_query,
                  batch * call->of_query[0] + head * call->of_query[1] + at * call->of_query[2],
                  call->of_query[2]);
        }
    store(memory.of_keys, width, call->keys, call->width, (float)call->scale, 0, call->is_wide, of_key,
          batch * call->of_key[0] + key_head * call->of_key[1], call->of_key[2]);
    store(memory.of_values, value_width, call->keys, call->value_width, 1.0f, 0, call->is_wide, of_value,
          batch * call->of_value[0] + key_head * call->of_value[1], call->of_value[2]);
}

/* Whether `by_tiles` is supported. */
int has_amx(void) { return find_amx(); }

/* The number of bytes that each thread needs. */
int64_t attention_bytes(const Call *call, int backward) { return memory_of(call, 0, backward).bytes; }

/* Writes `out`, and the log-sum-exp of each row into `log_sums`, of shape (batch, head, row). `kept` has shape (batch,
   head, row, column). `scratch` has `attention_bytes` bytes for each thread. */
void attention_forward(const Call *call, const uint16_t *query, const uint16_t *key, const uint16_t *value,
                       const void *mask, const uint8_t *kept, void *out, float *log_sums, char *scratch,
                       int threads) {
    int64_t bytes = attention_bytes(call, 0);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < call->batch * call->heads; i++)
        forward_of_head(call, query, key, value, mask, kept, out, log_sums, scratch + omp_get_thread_num() * bytes,
                        i / call->heads, i % call->heads);
}

/* Writes the gradients of query, key and value, given that of `out`. */
void attention_backward(const Call *call, const uint16_t *query, const uint16_t *key, const uint16_t *value,
                        const void *mask, const uint8_t *kept, const uint16_t *of_out, const float *log_sums,
                        void *of_query, void *of_key, void *of_value, char *scratch, int threads) {
    int64_t bytes = attention_bytes(call, 1);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < call->batch * call->heads; i++)
        backward_of_head(call, query, key, value, mask, kept, of_out, log_sums, of_query, of_key, of_value,
                         scratch + omp_get_thread_num() * bytes, i / call->heads, i % call->heads);
}
#endif
