"""Is "bf16-products" ever slower than fp32? ``python -m benchmarks.least_sizes [--only lstm] [--untuned]``.

The models of the users' suite train in blocks of steps, in turn in "bf16-products", 32 and "bf16". Each block is a
separate run, and its first steps are not timed. A row has the medians of the ratios of adjacent blocks, with the
lowest and the highest: above 1, "bf16-products" is faster. The tuner's measurements are kept between blocks.

``--sizes`` trains single layers of growing sizes in which every product rounds, without the tuner. The size
at which the ratio to 32 crosses 1, in multiplications of a product per thread, is its minimum size in
`nano_loop.policy.product_precision`.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nano_loop
from benchmarks.workloads import USERS, Workload
from nano_loop.policy import product_precision
from nano_loop.steps import products

PRODUCTS = "bf16-products"
OTHERS: tuple[int | str, ...] = (32, "bf16")
WARMUP = 5


class Case(NamedTuple):
    """A workload and, for a single layer, the multiplications of its product."""

    build: Callable[[], Workload]
    multiplications: int = 0


class FirstOutput(nn.Module):
    """A recurrent layer that returns its outputs without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        outputs: Tensor = self.layer(x)[0]
        return outputs


class SelfAttention(nn.Module):
    """Self-attention, with a factor for the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, attention: Tensor) -> Tensor:
        """Return the heads' outputs."""
        heads = attention * self.factor
        return F.scaled_dot_product_attention(heads, heads, heads)


#: The models of the suite at full size.
MODELS = {name: Case(partial(build, False)) for name, build in USERS.items()}


def single_layer(build: Callable[[], nn.Module], *shape: int) -> Workload:
    """Return a workload of a layer on one input."""
    model = build()
    return Workload(
        *(model, torch.optim.AdamW(model.parameters(), 1e-4), [torch.randn(shape)]),
        lambda model, x: model(x).square().mean(),
        images=isinstance(model, nn.Conv2d),
    )


def single_layers() -> Iterator[tuple[str, Case]]:
    """Yield layers whose products have growing numbers of multiplications."""
    for width, rows in ((192, 32), (192, 128), (192, 512), (512, 32), (512, 64), (512, 256), (1024, 32), (1024, 128)):
        linear = partial(single_layer, partial(nn.Linear, width, width), rows, width)
        yield f"linear {width}, {rows} rows", Case(linear, rows * width * width)
    for width, steps, batch in ((32, 20, 8), (64, 20, 8), (64, 20, 32), (128, 20, 8), (128, 20, 32), (256, 20, 16)):
        layer = partial(lambda width: FirstOutput(nn.LSTM(width, width, batch_first=True)), width)
        lstm = Case(partial(single_layer, layer, batch, steps, width), 8 * batch * steps * width**2)
        yield f"LSTM {width}, {batch} × {steps}", lstm
    for heads, length, batch in ((2, 32, 4), (4, 64, 4), (4, 128, 4), (8, 128, 8), (8, 256, 8)):
        attention = partial(single_layer, SelfAttention, batch, heads, length, 32)
        yield f"attention, {batch} × {heads} × {length}", Case(attention, 2 * batch * heads * length**2 * 32)
    for channels, size, batch in ((8, 32, 8), (16, 32, 8), (32, 16, 8), (32, 32, 8), (64, 16, 16), (64, 32, 16)):
        layer = partial(nn.Conv2d, channels, channels, 3, padding=1)
        convolution = partial(single_layer, layer, batch, channels, size, size)
        yield f"convolution {channels}, {batch} × {size}²", Case(convolution, batch * size**2 * channels**2 * 9)


@contextmanager
def every_product_rounded() -> Iterator[None]:
    """Let products of all sizes that the kernels support round their inputs."""
    least, smallest = dict(product_precision.MIN_MULTIPLICATIONS), products.SMALLEST_WEIGHT
    try:
        product_precision.MIN_MULTIPLICATIONS.update(dict.fromkeys(least, 0))
        products.SMALLEST_WEIGHT = 1
        yield
    finally:
        product_precision.MIN_MULTIPLICATIONS.update(least)
        products.SMALLEST_WEIGHT = smallest


def seconds_a_step(work: Workload, precision: int | str, block: float, **options: Any) -> float:
    """Return the median step time of a block of this many seconds, on one batch."""
    batch = next(iter(work.batches))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        times: list[float] = []
        while len(times) < 2 * WARMUP or sum(times) < block:
            start = time.perf_counter()
            work.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        return statistics.median(times[WARMUP:])

    options = {"precision": precision, "channels_last": work.images, "verbose": False, **options}
    return nano_loop.nano(**options)(train)(work.model, work.optimizer)


def seconds(
    case: Case, rounds: int, block: float, others: Sequence[int | str], **options: Any
) -> dict[int | str, list[float]]:
    """Return the seconds per step by precision, of each round."""
    work = case.build()
    times: dict[int | str, list[float]] = {precision: [] for precision in (PRODUCTS, *others)}
    for number in range(rounds + 1):  # the first one is for the tuner
        for precision in [*times][:: -1 if number % 2 else 1]:
            model, optimizer = copy.deepcopy((work.model, work.optimizer))
            copied = Workload(model, optimizer, work.batches, work.loss, images=work.images)
            times[precision] += [seconds_a_step(copied, precision, block, **options)][not number :]
    return times


def row(name: str, case: Case, times: Mapping[Any, list[float]]) -> str:
    """Return a row of the table."""
    ours = times[PRODUCTS]
    cells = [name, f"2^{math.log2(case.multiplications):.1f}" if case.multiplications else ""]
    cells += [f"{statistics.median(values) * 1e3:.3f}" for values in times.values()]
    for other in [*times][1:]:
        ratios = [theirs / own for theirs, own in zip(times[other], ours, strict=True)]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a block")
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--untuned", action="store_true", help="by the least sizes, without measurements")
    parser.add_argument("--sizes", action="store_true", help="single layers in which every product rounds")
    asked = parser.parse_args()
    cases = dict(single_layers()) if asked.sizes else MODELS
    others = OTHERS[:1] if asked.sizes else OTHERS
    options: dict[str, Any] = {"tune_operators": False} if asked.sizes or asked.untuned else {}
    headings = [
        "model",
        "multiplications",
        *(f"{name}, ms" for name in (PRODUCTS, *others)),
        *map("× {}".format, others),
    ]
    print(f"| {' | '.join(headings)} |\n|{' --- |' * len(headings)}", flush=True)
    with every_product_rounded() if asked.sizes else nullcontext():
        for name, case in cases.items():
            if any(part in name for part in asked.only.split(",")):
                times = seconds(case, asked.rounds, asked.seconds, others, num_threads=asked.threads, **options)
                print(row(name, case, times), flush=True)


if __name__ == "__main__":
    main()
