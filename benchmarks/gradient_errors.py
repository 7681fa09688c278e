"""Rounding errors of gradients by precision: ``python -m benchmarks.gradient_errors [--seeds 25]``.

Each small model computes one step in fp64 and in both precisions, with every product in bf16, whatever its size. A row
has the root mean square, over seeds and gradients, of the error relative to the gradient in fp64, and the two's ratio.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nano_loop
from nano_loop.kernels import rounding
from nano_loop.kernels.linear import product
from nano_loop.steps import bf16_products

PRODUCTS, AUTOCAST = "bf16-products", "autocast by hand"


class Attention(nn.Module):
    """Two blocks of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Classify the mean of a sequence."""
        return self.head(self.encoder(x).mean(1))


class Lstm(nn.Module):
    """Two layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(48, 64, 2, batch_first=True), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Classify the last output."""
        return self.head(self.lstm(x)[0][:, -1])


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.layers = nn.Sequential(first, nn.BatchNorm2d(channels), nn.SiLU(), second, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layers compute."""
        return F.silu(x + self.layers(x))


def perceptron() -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU()), *(nn.Linear(128, 128), nn.GELU()), nn.Linear(128, 32)
    )


def convolutional() -> nn.Module:
    """Return a small residual network."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.SiLU()),
        *(Residual(32), Residual(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32)),
    )


#: What builds each model, and the shape of its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (perceptron, (96, 64)),
    "convolutional": (convolutional, (32, 3, 16, 16)),
    "attention": (Attention, (32, 40, 64)),
    "LSTM": (Lstm, (32, 20, 48)),
}


@contextmanager
def every_product_rounded() -> Iterator[None]:
    """Let products of all sizes round their inputs."""
    least, fewest, smallest = dict(rounding.MIN_MULTIPLICATIONS), product.FEWEST, bf16_products.SMALLEST_WEIGHT
    try:
        rounding.MIN_MULTIPLICATIONS.update(dict.fromkeys(least, 1))
        product.FEWEST = bf16_products.SMALLEST_WEIGHT = 1
        yield
    finally:
        rounding.MIN_MULTIPLICATIONS.update(least)
        product.FEWEST, bf16_products.SMALLEST_WEIGHT = fewest, smallest


def gradients(model: nn.Module, x: Tensor, y: Tensor, autocast: bool = False) -> list[Tensor]:
    """Return the gradients of all parameters, in fp64."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    F.cross_entropy(out if out.dtype is torch.float64 else out.float(), y).backward()
    return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]


def errors(name: str, seed: int) -> dict[str, list[float]]:
    """Return the errors of each gradient by precision, relative to its norm."""
    torch.manual_seed(seed)
    build, shape = MODELS[name]
    model, x, y = build(), torch.randn(shape), torch.randint(32, shape[:1])
    exact = gradients(copy.deepcopy(model).double(), x.double(), y)
    channels_last = x.dim() == 4
    by_hand = copy.deepcopy(model)
    if channels_last:
        by_hand = by_hand.to(memory_format=torch.channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    train = nano_loop.nano(precision=PRODUCTS, channels_last=channels_last, verbose=False)(gradients)
    with every_product_rounded():
        ours = train(model, x, y)
    computed = {AUTOCAST: gradients(by_hand, x.contiguous(memory_format=layout), y, True), PRODUCTS: ours}
    # A bias that does not change the loss, as that of keys, has a gradient of rounding errors alone.
    largest = max(float(gradient.norm()) for gradient in exact)
    return {
        kind: [
            float((gradient - true).norm() / true.norm())
            for gradient, true in zip(found, exact, strict=True)
            if true.norm() > 1e-9 * largest
        ]
        for kind, found in computed.items()
    }


def rms(numbers: list[float]) -> float:
    """Return the root mean square."""
    return (sum(number * number for number in numbers) / len(numbers)) ** 0.5


def compared(name: str, seeds: int) -> tuple[float, float]:
    """Return the rms error under autocast by hand, and with rounded products."""
    by_seed = [errors(name, seed) for seed in range(seeds)]
    by_hand, ours = (rms([error for found in by_seed for error in found[kind]]) for kind in (AUTOCAST, PRODUCTS))
    return by_hand, ours


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=25)
    seeds = parser.parse_args().seeds
    print(f"| model | {AUTOCAST} | {PRODUCTS} | ratio |\n| --- | --- | --- | --- |")
    for name in MODELS:
        by_hand, ours = compared(name, seeds)
        print(f"| {name} | {by_hand:.2e} | {ours:.2e} | {ours / by_hand:.2f} |")


if __name__ == "__main__":
    main()
