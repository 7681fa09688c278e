"""Is "bf16-products" ever slower than fp32? ``python -m benchmarks.least_sizes [--only LSTM] [--untuned]``.

Small models train in blocks of steps, in turn in "bf16-products", 32 and "bf16". Each block is a separate run, and its
first steps are not timed. A row has the medians of the ratios of blocks beside one another, with the least and the
largest: above 1, "bf16-products" is faster. What the tuner has measured is kept from block to block.

``--sizes`` trains single layers of growing sizes in which every product rounds, without the tuner. Where the ratio to
32 crosses 1, by the multiplications of a product on each thread, is its least size in `nano_loop.kernels.rounding`.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nano_loop
from nano_loop.kernels import rounding
from nano_loop.steps import bf16_products

PRODUCTS = "bf16-products"
OTHERS: tuple[int | str, ...] = (32, "bf16")
WARMUP = 5


class Case(NamedTuple):
    """A model, and the shape of its input; of a single layer, also the multiplications of its product."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    multiplications: int = 0


class FirstOutput(nn.Module):
    """Returns the outputs of a recurrent layer without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        outputs: Tensor = self.layer(x)[0]
        return outputs


class SelfAttention(nn.Module):
    """Attention of heads to themselves, with a factor for the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, attention: Tensor) -> Tensor:
        """Return the heads' outputs."""
        heads = attention * self.factor
        return F.scaled_dot_product_attention(heads, heads, heads)


def perceptron(inputs: int, width: int, outputs: int) -> nn.Module:
    """Return two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.ReLU()), *(nn.Linear(width, width), nn.ReLU()), nn.Linear(width, outputs)
    )


def policy() -> nn.Module:
    """Return what reinforcement learning trains: two hidden layers of 64 neurons, with tanh."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def convolutional(width: int) -> nn.Module:
    """Return a small network for images."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )


def transformer(width: int) -> nn.Module:
    """Return two blocks."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def recurrent(kind: type[nn.RNNBase], width: int) -> nn.Module:
    """Return a recurrent layer that returns its outputs alone."""
    return FirstOutput(kind(width, width, batch_first=True))


MODELS = {
    "MLP 64, 64 rows": Case(lambda: perceptron(64, 64, 10), (64, 64)),
    "MLP 64, 4096 rows": Case(lambda: perceptron(64, 64, 10), (4096, 64)),
    "MLP 256, 128 rows": Case(lambda: perceptron(256, 256, 10), (128, 256)),
    "MLP 512, 32 rows": Case(lambda: perceptron(512, 512, 10), (32, 512)),
    "MLP 1024, 64 rows": Case(lambda: perceptron(1024, 1024, 10), (64, 1024)),
    "policy, 1 row": Case(policy, (1, 8)),
    "policy, 64 rows": Case(policy, (64, 8)),
    "policy, 2048 rows": Case(policy, (2048, 8)),
    "LSTM 64": Case(lambda: recurrent(nn.LSTM, 64), (32, 50, 64)),
    "LSTM 64, 4 sequences": Case(lambda: recurrent(nn.LSTM, 64), (4, 50, 64)),
    "LSTM 128": Case(lambda: recurrent(nn.LSTM, 128), (32, 50, 128)),
    "GRU 64": Case(lambda: recurrent(nn.GRU, 64), (32, 50, 64)),
    "GRU 256": Case(lambda: recurrent(nn.GRU, 256), (64, 30, 256)),
    "convolutional 16": Case(lambda: convolutional(16), (32, 3, 32, 32)),
    "convolutional 64": Case(lambda: convolutional(64), (16, 3, 32, 32)),
    "transformer 64": Case(lambda: transformer(64), (16, 64, 64)),
    "transformer 128": Case(lambda: transformer(128), (8, 128, 128)),
    "transformer 256": Case(lambda: transformer(256), (8, 128, 256)),
}


def single_layers() -> Iterator[tuple[str, Case]]:
    """Yield layers whose products have growing numbers of multiplications."""
    for width, rows in ((192, 32), (192, 128), (192, 512), (512, 32), (512, 64), (512, 256), (1024, 32), (1024, 128)):
        linear = Case(lambda width=width: nn.Linear(width, width), (rows, width), rows * width * width)
        yield f"linear {width}, {rows} rows", linear
    for width, steps, batch in ((32, 20, 8), (64, 20, 8), (64, 20, 32), (128, 20, 8), (128, 20, 32), (256, 20, 16)):
        lstm = Case(lambda width=width: recurrent(nn.LSTM, width), (batch, steps, width), 8 * batch * steps * width**2)
        yield f"LSTM {width}, {batch} × {steps}", lstm
    for heads, length, batch in ((2, 32, 4), (4, 64, 4), (4, 128, 4), (8, 128, 8), (8, 256, 8)):
        attention = Case(SelfAttention, (batch, heads, length, 32), 2 * batch * heads * length**2 * 32)
        yield f"attention, {batch} × {heads} × {length}", attention
    for channels, size, batch in ((8, 32, 8), (16, 32, 8), (32, 16, 8), (32, 32, 8), (64, 16, 16), (64, 32, 16)):
        multiplications = batch * size**2 * channels**2 * 9
        convolution = Case(
            lambda channels=channels: nn.Conv2d(channels, channels, 3, padding=1),
            (batch, channels, size, size),
            multiplications,
        )
        yield f"convolution {channels}, {batch} × {size}²", convolution


@contextmanager
def every_product_rounded() -> Iterator[None]:
    """Let products of all sizes round their inputs that the kernels take."""
    least, smallest = dict(rounding.MIN_MULTIPLICATIONS), bf16_products.SMALLEST_WEIGHT
    try:
        rounding.MIN_MULTIPLICATIONS.update(dict.fromkeys(least, 0))
        bf16_products.SMALLEST_WEIGHT = 1
        yield
    finally:
        rounding.MIN_MULTIPLICATIONS.update(least)
        bf16_products.SMALLEST_WEIGHT = smallest


def seconds_a_step(case: Case, model: nn.Module, precision: int | str, block: float, **options: Any) -> float:
    """Return the median time of the steps of a block that takes so many seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(case.shape)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        times: list[float] = []
        while len(times) < 2 * WARMUP or sum(times) < block:
            start = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        return statistics.median(times[WARMUP:])

    channels_last = len(case.shape) == 4 and any(isinstance(module, nn.Conv2d) for module in model.modules())
    options = {"precision": precision, "channels_last": channels_last, "verbose": False, **options}
    return nano_loop.nano(**options)(train)(model, optimizer)


def seconds(
    case: Case, rounds: int, block: float, others: Sequence[int | str], **options: Any
) -> dict[int | str, list[float]]:
    """Return the seconds a step by precision, of each round."""
    model = case.build()
    model(torch.randn(case.shape))
    times: dict[int | str, list[float]] = {precision: [] for precision in (PRODUCTS, *others)}
    for number in range(rounds + 1):  # the first one is for the tuner
        for precision in [*times][:: -1 if number % 2 else 1]:
            times[precision] += [seconds_a_step(case, copy.deepcopy(model), precision, block, **options)][not number :]
    return times


def row(name: str, case: Case, times: Mapping[Any, list[float]]) -> str:
    """Return a row of the table."""
    ours = times[PRODUCTS]
    cells = [name, f"2^{math.log2(case.multiplications):.1f}" if case.multiplications else ""]
    cells += [f"{statistics.median(values) * 1e3:.3f}" for values in times.values()]
    for other in [*times][1:]:
        found = [theirs / own for theirs, own in zip(times[other], ours, strict=True)]
        cells.append(f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")
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
