/* The sizes of attention, and where its tensors lie. */
#pragma once
#include <stdint.h>

/* Offsets are numbers of elements; of a tensor (batch, head, row, column) in this order, with columns side by side. */
typedef struct {
    int64_t batch, heads, group;      /* heads of the keys, and how many of the queries share one */
    int64_t length, keys, width, value_width;
    int64_t query[3], key[3], value[3], out[3]; /* offsets of a batch, a head and a row */
    int64_t of_query[3], of_key[3], of_value[3], of_out[3]; /* the same of the gradients */
    int64_t mask[4], mask_kind; /* 0: none, 1: bool, 2: bf16 to be added, 3: fp32 to be added */
    int64_t causal;
    int64_t is_wide;            /* whether the output and the gradients of query, key and value are fp32 */
    int64_t by_tiles;           /* whether the tiles of AMX compute products */
    double scale, kept;               /* the second is the probability of being kept by the dropout, 1 without one */
} Call;
