"""Time the products of linear layers with bf16 factors, by oneDNN and in C, in turn and in one process.

python -m benchmarks.products
python -m benchmarks.products --shapes 1024,768,3072 --threads 1 --rounds 3

A shape is rows, inputs and outputs. The factors and the result are bf16 or fp32. fp32 factors are rounded: by casts
around oneDNN's product, and inside ours. The time of a round is the fastest of some calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from benchmarks.experts import keep_memory
from benchmarks.markdown import table
from benchmarks.names import at_least_one
from nano_loop.kernels.linear import product

CALLS, ENOUGH_SECONDS = 3, 0.05
KINDS = "forward", "inputs' gradient", "weight's gradient"


class Shape(NamedTuple):
    """The sizes of a linear layer's products."""

    rows: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return ", ".join(map(str, self))


#: The linear layers of BERT-base, GPT-2, ViT-S and the LSTM, and those of the issue that asked for AMX.
SHAPES = (
    *(Shape(1024, 768, 768), Shape(1024, 768, 2304), Shape(1024, 768, 3072), Shape(1024, 3072, 768)),
    *(Shape(3152, 384, 1152), Shape(3152, 384, 1536), Shape(3152, 1536, 384)),
    *(Shape(1024, 512, 10_000), Shape(2048, 2048, 2048), Shape(4096, 1024, 4096)),
)
Products = dict[str, Callable[[], torch.Tensor]]


def shape(text: str) -> Shape:
    """Parse a shape."""
    numbers = text.split(",")
    if len(numbers) != 3 or not all(map(str.isdecimal, numbers)):
        raise argparse.ArgumentTypeError(f"{text}: not three numbers")
    return Shape(*map(int, numbers))


def products(sizes: Shape, dtype: torch.dtype) -> dict[str, tuple[Products, float]]:
    """Return by kind the product by oneDNN and in C, and its FLOPs."""
    x, weight, gradient = (
        torch.randn(size, dtype=dtype)
        for size in ((sizes.rows, sizes.inputs), (sizes.outputs, sizes.inputs), (sizes.rows, sizes.outputs))
    )
    pairs = zip(KINDS, ((x, weight.t()), (gradient, weight), (gradient.t(), x)), strict=True)
    flops = 2.0 * sizes.rows * sizes.inputs * sizes.outputs
    return {kind: (_algorithms(a, b, dtype), flops) for kind, (a, b) in pairs}


def _algorithms(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Products:
    if dtype is torch.bfloat16:
        return {"oneDNN": lambda: a @ b, "C": lambda: product.product(a, b)}
    return {"oneDNN": lambda: (a.bfloat16() @ b.bfloat16()).float(), "C": lambda: product.product(a, b, dtype=dtype)}


def measure(algorithms: Products, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by algorithm."""
    times: dict[str, list[float]] = {name: [] for name in algorithms}
    for number in range(rounds + 1):  # the first one is a warm-up
        for name in [*algorithms][:: -1 if number % 2 else 1]:
            times[name] += [_fastest(algorithms[name])][not number :]
    return times


def _fastest(compute: Callable[[], object]) -> float:
    seconds: list[float] = []
    while len(seconds) < CALLS or sum(seconds) < ENOUGH_SECONDS:
        start = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def rows(shapes: Iterable[Shape], dtype: torch.dtype, rounds: int) -> tuple[list[list[str]], list[float]]:
    """Return the rows of the table, with the rates in GFLOP/s, and all ratios."""
    lines, ratios = [], []
    for sizes in shapes:
        for kind, (algorithms, flops) in products(sizes, dtype).items():
            times = measure(algorithms, rounds)
            each = sorted(theirs / ours for theirs, ours in zip(times["oneDNN"], times["C"], strict=True))
            ratios.append(statistics.median(each))
            rates = [f"{flops / statistics.median(seconds) / 1e9:.0f}" for seconds in times.values()]
            lines.append([str(sizes), kind, *rates, f"{ratios[-1]:.2f} ({each[0]:.2f} to {each[-1]:.2f})"])
    return lines, ratios


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.products", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, help="such as 1024,768,3072")
    parser.add_argument("--numbers", choices=("bf16", "fp32"), nargs="+", default=("bf16", "fp32"))
    parser.add_argument("--threads", type=at_least_one, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=at_least_one, default=5, help="default: 5")
    options = parser.parse_args(given)
    keep_memory()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, {'with' if product.KERNEL.uses_amx else 'without'} AMX")
    head = ["rows, inputs, outputs", "product", "oneDNN, GFLOP/s", "C", "×"]
    for numbers in options.numbers:
        lines, ratios = rows(options.shapes, {"bf16": torch.bfloat16, "fp32": torch.float32}[numbers], options.rounds)
        summary = f"geometric mean {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}"
        print(f"\n{numbers}: {summary}\n\n{table(head, lines)}")


if __name__ == "__main__":
    main()
