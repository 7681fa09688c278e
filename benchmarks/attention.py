"""Time several implementations of attention in bf16, forward and backward, in turn and in one process.

python -m benchmarks.attention
python -m benchmarks.attention --shapes 8,12,128,64,dropout --rounds 3

A shape is batch, heads, length and width, and optionally "causal" or "dropout" (of 0.1). glibc keeps freed
memory, as in a run with the allocator step. The time of a round is the fastest of some calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import torch

from benchmarks.experts import keep_memory
from benchmarks.markdown import table
from benchmarks.names import at_least_one
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.attention.attention import BLOCKS
from nano_loop.kernels.bernoulli import vectorized_draws
from nano_loop.kernels.override import TORCH

CALLS, DROPOUT = 4, 0.1
ALGORITHMS = {TORCH: blocked_attention.by_torch, BLOCKS: blocked_attention.blocked_attention}


class Shape(NamedTuple):
    """The sizes of an attention, and whether it is causal or has a dropout."""

    batch: int
    heads: int
    length: int
    width: int
    kind: str = ""

    def __str__(self) -> str:
        return ", ".join(map(str, self[:4])) + f", {self.kind}" * bool(self.kind)


SHAPES = (
    *(Shape(8, 12, 128, 64), Shape(8, 12, 128, 64, "dropout"), Shape(16, 6, 197, 64), Shape(4, 12, 256, 64)),
    *(Shape(4, 12, 256, 64, "causal"), Shape(2, 12, 512, 64), Shape(1, 12, 1024, 64), Shape(1, 12, 2048, 64)),
    Shape(2, 2, 64, 32),  # the smallest that torch does not compute
)


def shape(text: str) -> Shape:
    """Parse a shape."""
    *sizes, last = text.split(",")
    kind = "" if last.isdecimal() else last
    numbers = [int(each) for each in sizes + [last] * (not kind)]
    if len(numbers) != 4 or kind not in ("", "causal", "dropout"):
        raise argparse.ArgumentTypeError(f"{text}: not four numbers, and causal or dropout or nothing")
    return Shape(*numbers, kind)


def measure(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round, by implementation."""
    sizes = shape.batch, shape.length, shape.heads, shape.width
    tensors = [torch.randn(sizes).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)]
    gradient = torch.randn(sizes).bfloat16().transpose(1, 2)
    dropout = DROPOUT if shape.kind == "dropout" else 0.0
    given = (*tensors, None, dropout, shape.kind == "causal", shape.width**-0.5)

    def milliseconds(way: str) -> float:
        start = time.perf_counter()
        torch.autograd.grad(ALGORITHMS[way](*given), tensors, gradient)
        return (time.perf_counter() - start) * 1e3

    ways = [TORCH, *[BLOCKS] * blocked_attention.supports(*tensors)]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, times in found.items():
            times.append(min(milliseconds(way) for _ in range(CALLS)))
    return found


def row(shape: Shape, found: dict[str, list[float]]) -> list[str]:
    """Return a row of the table."""
    cells = [str(shape), f"{statistics.median(found[TORCH]):.3g}"]
    times = found.get(BLOCKS)
    if times is None:
        return [*cells, "–", "–"]
    ratios = sorted(a / b for a, b in zip(found[TORCH], times, strict=True))
    middle = statistics.median(ratios)
    return [*cells, f"{statistics.median(times):.3g}", f"{middle:.2g} ({ratios[0]:.2g} to {ratios[-1]:.2g})"]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, help="such as 8,12,128,64,dropout")
    parser.add_argument("--rounds", type=at_least_one, default=7, help="default: 7")
    options = parser.parse_args(given)
    keep_memory()
    head = ["batch, heads, length, width", "torch's kernel, ms", "blocks", "×"]
    with vectorized_draws():
        print(table(head, [row(each, measure(each, options.rounds)) for each in options.shapes]))


if __name__ == "__main__":
    main()
