"""Measure rounding errors of gradients by precision: ``python -m benchmarks.gradient_errors [--seeds 25] [--shares]``.

Each small model computes one step in fp64 and in each precision, with every product in bf16, whatever its size. A row
has the root mean square, over seeds and gradients, of the error relative to the gradient in fp64, and the ratios to
manual autocast.

``--shares`` prints the fraction of the multiplications of a step that is in bf16 under "bf16-products" without the
tuner, for a BERT of two layers and a ResNet-50.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import nano_loop
from benchmarks.workloads.models import Bottleneck, ResNet
from nano_loop.kernels.linear import product
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.policy import product_precision
from nano_loop.steps import products

PRODUCTS, BF16, AUTOCAST = "bf16-products", "bf16", "autocast by hand"


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
        """Add the output of the layers."""
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


#: The constructor of each model, and the shape of its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (perceptron, (96, 64)),
    "convolutional": (convolutional, (32, 3, 16, 16)),
    "attention": (Attention, (32, 40, 64)),
    "LSTM": (Lstm, (32, 20, 48)),
}


@contextmanager
def every_product_rounded() -> Iterator[None]:
    """Let products of all sizes round their inputs."""
    least, fewest, smallest = dict(product_precision.MIN_MULTIPLICATIONS), product.FEWEST, products.SMALLEST_WEIGHT
    try:
        product_precision.MIN_MULTIPLICATIONS.update(dict.fromkeys(least, 1))
        product.FEWEST = products.SMALLEST_WEIGHT = 1
        yield
    finally:
        product_precision.MIN_MULTIPLICATIONS.update(least)
        product.FEWEST, products.SMALLEST_WEIGHT = fewest, smallest


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
    computed = {AUTOCAST: gradients(by_hand, x.contiguous(memory_format=layout), y, True)}
    for precision in (BF16, PRODUCTS):
        train = nano_loop.nano(precision=precision, channels_last=channels_last, verbose=False)(gradients)
        with every_product_rounded():
            computed[precision] = train(copy.deepcopy(model), x, y)
    # If a bias does not change the loss, like that of keys, its gradient is only rounding errors.
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


def compared(name: str, seeds: int) -> dict[str, float]:
    """Return the rms error by precision."""
    by_seed = [errors(name, seed) for seed in range(seeds)]
    return {kind: rms([error for by_kind in by_seed for error in by_kind[kind]]) for kind in (AUTOCAST, BF16, PRODUCTS)}


class Bert(nn.Module):
    """Two layers of BERT-base and its head, which shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30522, 768), nn.Parameter(torch.zeros(128, 768))
        layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        self.encoder, self.transform = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(768, 768)
        self.norm = nn.LayerNorm(768)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of all words at all positions."""
        hidden = self.transform(self.encoder(self.words(tokens) + self.places))
        return F.linear(self.norm(F.gelu(hidden)), self.words.weight)


#: The constructor of each model, and its input, for the shares.
SHARES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "BERT, 2 layers, 8 × 128": (Bert, lambda: torch.randint(30522, (8, 128))),
    "ResNet-50, 16 × 224²": (lambda: ResNet(Bottleneck, 4, (3, 4, 6, 3)), lambda: torch.randn(16, 3, 224, 224)),
}


def share_in_bf16(name: str) -> float:
    """Return the fraction of the multiplications of a step whose inputs are rounded, without the tuner."""
    build, batch = SHARES[name]
    model, x = build(), batch()
    x.requires_grad_(x.is_floating_point())  # so that each product has two gradients

    def step(model: nn.Module) -> None:
        outputs = model(x).flatten(0, -2)
        F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.int64)).backward()

    with FlopCounterMode(display=False) as counter:
        step(model)
    rounded: list[int] = []

    def record(rule: product_precision.Policy, kind: str, count: int, packed: int) -> None:
        # In a backward pass, one call computes the gradients of the input and of the weight.
        two_gradients = kind == product_precision.CONVOLUTION and in_backward()
        rounded.append(2 * count if two_gradients else count)

    options = {"channels_last": x.dim() == 4, "tune_operators": False, "verbose": False}
    with mock.patch.object(product_precision.Policy, "note", record):
        nano_loop.nano(precision=PRODUCTS, **options)(step)(model)
    return 2 * sum(rounded) / counter.get_total_flops()


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--shares", action="store_true", help="print the shares in bf16 instead")
    asked = parser.parse_args()
    if asked.shares:
        print("| model | multiplications in bf16 |\n| --- | --- |")
        for name in SHARES:
            print(f"| {name} | {share_in_bf16(name):.1%} |", flush=True)
        return
    print(f"| model | {AUTOCAST} | {BF16} | ratio | {PRODUCTS} | ratio |\n|{' --- |' * 6}")
    for name in MODELS:
        by_hand, *others = compared(name, asked.seeds).values()
        cells = [f"{error:.2e} | {error / by_hand:.2f}" for error in others]
        print(f"| {name} | {by_hand:.2e} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
