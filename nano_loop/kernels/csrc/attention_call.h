/* The sizes of attention, and the layouts of its tensors. */
#pragma once
#include <stdint.h>

/* Strides are in elements, for tensors (batch, head, row, column) with contiguous columns. */
typedef struct {
    int64_t batch, heads, group;      /* heads of the keys, and the number of query heads per key head */
    int64_t length, keys, width, value_width;
    int64_t query[3], key[3], value[3], out[3]; /* strides of batch, head and row */
    int64_t of_query[3], of_key[3], of_value[3], of_out[3]; /* strides of the gradients */
    int64_t mask[4], mask_kind; /* 0: none, 1: bool, 2: bf16 to be added, 3: fp32 to be added */
    int64_t causal;
    int64_t is_wide;            /* whether the output and the gradients of query, key and value are fp32 */
    int64_t by_tiles;           /* whether to use AMX tiles */
    double scale, kept;               /* `kept` is 1 - dropout_p */
} Call;
