"""Matrix products, in bf16 and in fp32."""

import functools
import itertools

import torch

from kernels.compared.oracle import Row, assert_alike, drawn, plus
from nano_loop.kernels.linear import fp32_product, product

#: The order of a matrix in memory: by rows, by columns, and with gaps between rows, columns or both.
ORDERS = ("rows", "columns", "rows with gaps", "columns with gaps", "gaps")


def matrix(rows, columns, order, dtype, generator):
    step, row = {"rows": (1, 1), "columns": (1, 1), "gaps": (2, 3)}.get(order, (1, 3))
    sizes = (columns, rows) if "columns" in order else (rows, columns)
    made = torch.randn(sizes[0] * row, sizes[1] * step + (row > 1), generator=generator).to(dtype)
    made = made[::row, : sizes[1] * step : step]
    return made.t() if "columns" in order else made


def factors(rows=64, depth=80, columns=64, a="rows", b="rows", with_bias=True, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(columns, generator=generator).to(dtype) if with_bias else None
    return matrix(rows, depth, a, dtype, generator), matrix(depth, columns, b, dtype, generator), bias


def by_torch(call):
    a, b, bias = call
    return [a @ b if bias is None else torch.addmm(bias, a, b)]


def sized(*sizes, **named):
    return dict(zip(("rows", "depth", "columns"), sizes, strict=True), **named)


def sizes_from(least, orders):
    numbers, order = (least, 150), [*orders]
    return drawn(
        rows=numbers, depth=numbers, columns=numbers, a=order, b=order, with_bias=[False, True], seed=(0, 1000)
    )


def of_each_order(sizes, *orders):
    return [sized(*each, a=a, b=b) for each in sizes for a, b in itertools.product(orders, repeat=2)]


def not_finite(dtype):
    a, b, bias = factors(40, 65, 70, dtype=dtype)
    a[3, 64], b[5, 69] = torch.inf, torch.nan
    return a, b, bias


def bytes_of_each_kind(call):
    """Compute the result in bf16, the result of fp32 factors, and the result of a batch of eight."""
    a, b, bias = call
    product.product(a, b, bias)
    product.product(a.float(), b.float(), bias.float(), dtype=torch.float32)
    product.product(a.float().expand(8, *a.shape), b.expand(8, *b.shape))


#: Depths that are split into blocks, more columns than a block has, and more rows than a chunk has.
LARGE = [(70, 4500, 130), (40, 5001, 700), (500, 33, 4000), (2000, 300, 65), (33, 12000, 64)]
IN_BF16 = Row(
    make=functools.partial(factors, dtype=torch.bfloat16),
    ours=lambda call: [product.product(*call)],
    torchs=by_torch,
    bound=plus(1.2),
    also=assert_alike,
    sizes=sizes_from(32, ORDERS[:2]),
    large=of_each_order(LARGE, "rows", "columns"),
    threads=(1, 3, 7, 16),
    ends=[sized(*each, a=a) for each in ((33, 4500, 65), (100, 77, 500), (400, 64, 32)) for a in ORDERS[:2]],
    behind=bytes_of_each_kind,
    memories=6,
    supports=lambda call: product.supports(*call),
    others={
        "few rows": lambda call: (call[0][:31], *call[1:]),
        "few columns": lambda call: (call[0], call[1][:, :31], call[2][:31]),
        "little depth": lambda call: (call[0][:, :31], call[1][:31], call[2]),
        "every second column": lambda call: (call[0][:, ::2], call[1][: call[1].size(0) // 2], call[2]),
        "one row for all": lambda call: (call[0][:1].expand_as(call[0]), *call[1:]),
        "one number for all": lambda call: (*call[:2], call[2][:1].expand_as(call[2])),
    },
    undefined={"inf, NaN": functools.partial(not_finite, torch.bfloat16)},
    kernel=product.KERNEL,
)
#: A depth of several blocks, more rows than are packed at a time, and many columns.
LARGE_IN_FP32 = [(70, 1500, 130), (300, 33, 400), (2000, 300, 65), (5, 600, 1001)]
IN_FP32 = Row(
    make=factors,
    ours=lambda call: [fp32_product.product(*call)],
    torchs=by_torch,
    bound=plus(1.2, 2**-25),
    also=assert_alike,
    sizes=sizes_from(1, ORDERS),
    large=of_each_order(LARGE_IN_FP32, "rows", "columns", "gaps"),
    threads=(1, 2, 3, 4),
    ends=[sized(7, 30, 65), sized(1, 1, 1), sized(13, 300, 17)],
    undefined={"inf, NaN": functools.partial(not_finite, torch.float32)},
    kernel=fp32_product.KERNEL,
)
