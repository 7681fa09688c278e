/* Products of fp32 matrices with any strides, by any number of threads. */
#include "fp32_product.h"
#include "threads.h"

#define PACKING 2 /* packing a tile takes as long as the products of this many times `ROWS` rows */

/* The number of column parts for the threads that minimizes the time of the slowest. Rows are divided by the rest. */
static int64_t parts_of_columns(int64_t groups, int64_t tiles, int64_t threads) {
    int64_t best = 1, least_time = 0;
    for (int64_t parts = 1; parts <= least(threads, tiles); parts++) {
        int64_t time = divided(tiles, parts) * (divided(groups, least(threads / parts, groups)) + PACKING);
        if (parts > 1 && time >= least_time) continue;
        best = parts, least_time = time;
    }
    return best;
}

/* Writes a b, or a b + bias if `bias` is not NULL. OpenMP may provide fewer threads than requested. */
void fp32_product(const Shape *call, const float *a, const float *b, const float *bias, float *out, int threads) {
    Work work = {call, a, b, bias, out};
    int64_t groups = divided(call->rows, ROWS), tiles = divided(call->columns, TILE);
    int64_t most_threads = least(threads, 1 + call->rows * call->columns * call->depth / MULTIPLICATIONS);
    int64_t of_columns = parts_of_columns(groups, tiles, most_threads);
    int64_t of_rows = least(most_threads / of_columns, groups), parts = of_rows * of_columns;
#pragma omp parallel num_threads((int)parts)
    for (int64_t part = omp_get_thread_num(); part < parts; part += omp_get_num_threads()) {
        int64_t row = part % of_rows, column = part / of_rows;
        multiply(&work, groups * row / of_rows * ROWS, least(call->rows, groups * (row + 1) / of_rows * ROWS),
                 tiles * column / of_columns * TILE, least(call->columns, tiles * (column + 1) / of_columns * TILE));
    }
}
