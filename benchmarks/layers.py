"""The layers of public models that `benchmarks.shapes` measures, with their shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """A layer of a public model.

    Parameters
    ----------
    model : str
        The model.
    shape : tuple of int
        The shape of the layer's input, batch first.
    kind : callable
        The layer's class.
    args, named : tuple, dict
        Its arguments.
    first : bool
        Whether its input is the model's: in fp32 and without a gradient. Other inputs have autocast's dtype.
    """

    model: str
    shape: tuple[int, ...]
    kind: Callable[..., nn.Module]
    args: tuple[Any, ...]
    named: dict[str, Any]
    first: bool = False

    def build(self) -> nn.Module:
        return self.kind(*self.args, **self.named)

    @property
    def text(self) -> str:
        """The layer as source code."""
        named = [f"{name}={value}" for name, value in self.named.items()]
        return f"{self.kind.__name__}({', '.join([*map(str, self.args), *named])})"

    @property
    def input(self) -> Tensor:
        """A batch for the layer: indices for embeddings, otherwise random values."""
        if self.kind in (nn.Embedding, nn.EmbeddingBag):
            return torch.randint(self.args[0], self.shape)
        return torch.randn(self.shape)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The memory layouts in which it is measured."""
        return ("NCHW", "NHWC") if len(self.shape) in (4, 5) else ("",)


class SelfAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` of a sequence with itself."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class LSTM(nn.LSTM):
    """`torch.nn.LSTM` without its last state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class GRU(nn.Module):
    """`torch.nn.GRU` without its last state."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__()
        self.layer = nn.GRU(*args, **named)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)[0]
        return outputs


class Policy(nn.Sequential):
    """A policy of reinforcement learning: two hidden layers of 64 neurons."""

    def __init__(self, observations: int, actions: int) -> None:
        hidden = (nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        super().__init__(*hidden, nn.Linear(64, actions))


def _of(model: str, *layers: Layer) -> tuple[Layer, ...]:
    return tuple(Layer(model, *(getattr(each, name) for name in _FIELDS)) for each in layers)


_FIELDS = ("shape", "kind", "args", "named", "first")


def _first(shape: tuple[int, ...], kind: Callable[..., nn.Module], *args: Any, **named: Any) -> Layer:
    return Layer("", shape, kind, args, named, first=True)


def _at(shape: tuple[int, ...], kind: Callable[..., nn.Module], *args: Any, **named: Any) -> Layer:
    return Layer("", shape, kind, args, named)


LAYERS = (
    *_of(
        "DCGAN",
        _first((64, 3, 64, 64), nn.Conv2d, 3, 64, 4, 2, 1, bias=False),
        _at((64, 64, 32, 32), nn.Conv2d, 64, 128, 4, 2, 1, bias=False),
        _at((64, 256, 8, 8), nn.Conv2d, 256, 512, 4, 2, 1, bias=False),
        _at((64, 512, 4, 4), nn.Conv2d, 512, 1, 4, bias=False),
        _first((64, 100, 1, 1), nn.ConvTranspose2d, 100, 512, 4, bias=False),
        _at((64, 512, 4, 4), nn.ConvTranspose2d, 512, 256, 4, 2, 1, bias=False),
        _at((64, 128, 16, 16), nn.ConvTranspose2d, 128, 64, 4, 2, 1, bias=False),
        _at((64, 64, 32, 32), nn.ConvTranspose2d, 64, 3, 4, 2, 1, bias=False),
        _at((64, 64, 32, 32), nn.BatchNorm2d, 64),
        _at((64, 64, 32, 32), nn.LeakyReLU, 0.2),
        _at((64, 3, 64, 64), nn.Tanh),
    ),
    *_of(
        "pix2pix",
        _first((1, 3, 256, 256), nn.Conv2d, 3, 64, 4, 2, 1),
        _at((1, 128, 64, 64), nn.Conv2d, 128, 256, 4, 2, 1),
        _at((1, 512, 4, 4), nn.Conv2d, 512, 512, 4, 2, 1),
        _at((1, 512, 1, 1), nn.ConvTranspose2d, 512, 512, 4, 2, 1),
        _at((1, 512, 32, 32), nn.ConvTranspose2d, 512, 128, 4, 2, 1),
        _at((1, 128, 128, 128), nn.ConvTranspose2d, 128, 3, 4, 2, 1),
        _at((1, 512, 31, 31), nn.Conv2d, 512, 1, 4, 1, 1),
        _at((1, 64, 128, 128), nn.InstanceNorm2d, 64),
    ),
    *_of(
        "U-Net",
        _first((4, 1, 128, 128), nn.Conv2d, 1, 64, 3, padding=1),
        _at((4, 64, 128, 128), nn.Conv2d, 64, 64, 3, padding=1),
        _at((4, 256, 32, 32), nn.Conv2d, 256, 256, 3, padding=1),
        _at((4, 256, 32, 32), nn.ConvTranspose2d, 256, 128, 2, 2),
        _at((4, 64, 128, 128), nn.Conv2d, 64, 2, 1),
        _at((4, 64, 128, 128), nn.MaxPool2d, 2),
        _at((4, 64, 64, 64), nn.Upsample, scale_factor=2, mode="bilinear"),
        _at((4, 64, 128, 128), nn.GroupNorm, 8, 64),
    ),
    *_of(
        "DeepLabV3",
        _at((2, 512, 28, 28), nn.Conv2d, 512, 256, 3, padding=12, dilation=12),
        _at((2, 256, 28, 28), nn.Conv2d, 256, 21, 1),
        _at((2, 512, 28, 28), nn.AdaptiveAvgPool2d, 1),
        _at((2, 512, 1, 1), nn.Conv2d, 512, 256, 1),
        _at((2, 21, 28, 28), nn.Upsample, size=224, mode="bilinear"),
        _at((2, 21, 28, 28), nn.ConvTranspose2d, 21, 21, 16, 8, 4, groups=21),
    ),
    *_of(
        "VAE",
        _first((128, 784), nn.Linear, 784, 400),
        _at((128, 400), nn.Linear, 400, 20),
        _at((128, 20), nn.Linear, 20, 400),
        _first((64, 3, 64, 64), nn.Conv2d, 3, 32, 3, 2, 1),
        _at((64, 128, 8, 8), nn.Conv2d, 128, 256, 3, 2, 1),
        _at((64, 256, 4, 4), nn.ConvTranspose2d, 256, 128, 3, 2, 1, output_padding=1),
        _at((64, 32, 32, 32), nn.ConvTranspose2d, 32, 32, 3, 2, 1, output_padding=1),
        _at((64, 32, 64, 64), nn.Conv2d, 32, 3, 3, padding=1),
    ),
    *_of(
        "ConvNeXt-T",
        _first((8, 3, 224, 224), nn.Conv2d, 3, 96, 4, 4),
        _at((8, 96, 56, 56), nn.Conv2d, 96, 96, 7, padding=3, groups=96),
        _at((8, 384, 14, 14), nn.Conv2d, 384, 384, 7, padding=3, groups=384),
        _at((8, 768, 7, 7), nn.Conv2d, 768, 768, 7, padding=3, groups=768),
        _at((8 * 196, 384), nn.Linear, 384, 1536),
        _at((8 * 3136, 96), nn.LayerNorm, 96),
        _at((8 * 196, 1536), nn.GELU),
    ),
    *_of(
        "MobileNetV2",
        _first((16, 3, 224, 224), nn.Conv2d, 3, 32, 3, 2, 1, bias=False),
        _at((16, 32, 112, 112), nn.Conv2d, 32, 32, 3, padding=1, groups=32, bias=False),
        _at((16, 144, 56, 56), nn.Conv2d, 144, 144, 3, 2, 1, groups=144, bias=False),
        _at((16, 576, 14, 14), nn.Conv2d, 576, 576, 3, padding=1, groups=576, bias=False),
        _at((16, 960, 7, 7), nn.Conv2d, 960, 960, 3, padding=1, groups=960, bias=False),
        _at((16, 96, 14, 14), nn.Conv2d, 96, 576, 1, bias=False),
        _at((16, 576, 14, 14), nn.BatchNorm2d, 576),
        _at((16, 576, 14, 14), nn.ReLU6),
    ),
    *_of(
        "EfficientNet-B0",
        _at((16, 240, 28, 28), nn.Conv2d, 240, 240, 5, 2, 2, groups=240, bias=False),
        _at((16, 672, 14, 14), nn.Conv2d, 672, 672, 5, padding=2, groups=672, bias=False),
        _at((16, 240, 1, 1), nn.Conv2d, 240, 10, 1),
        _at((16, 10, 1, 1), nn.Conv2d, 10, 240, 1),
        _at((16, 240, 28, 28), nn.SiLU),
        _at((16, 1280), nn.Linear, 1280, 1000),
    ),
    *_of(
        "ResNeXt-50, ShuffleNet",
        _at((8, 128, 56, 56), nn.Conv2d, 128, 128, 3, padding=1, groups=32, bias=False),
        _at((8, 512, 14, 14), nn.Conv2d, 512, 512, 3, padding=1, groups=32, bias=False),
        _at((16, 240, 28, 28), nn.Conv2d, 240, 60, 1, groups=3, bias=False),
        _at((16, 240, 28, 28), nn.ChannelShuffle, 3),
    ),
    *_of(
        "M5, WaveNet, QuartzNet, HiFi-GAN",
        _first((32, 1, 8000), nn.Conv1d, 1, 128, 80, 4),
        _at((32, 128, 496), nn.Conv1d, 128, 128, 3),
        _at((4, 64, 4096), nn.Conv1d, 64, 128, 2, dilation=64),
        _at((8, 256, 200), nn.Conv1d, 256, 256, 33, padding=16, groups=256),
        _at((8, 256, 200), nn.Conv1d, 256, 512, 1),
        _at((16, 512, 32), nn.ConvTranspose1d, 512, 256, 16, 8, 4),
        _at((16, 32, 8192), nn.Conv1d, 32, 1, 7, padding=3),
        _at((32, 128, 496), nn.BatchNorm1d, 128),
    ),
    *_of(
        "R3D-18, 3-D U-Net, X3D",
        _first((2, 3, 8, 112, 112), nn.Conv3d, 3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False),
        _at((2, 128, 4, 28, 28), nn.Conv3d, 128, 128, 3, padding=1, bias=False),
        _at((1, 64, 16, 16, 16), nn.ConvTranspose3d, 64, 32, 2, 2),
        _at((2, 54, 8, 28, 28), nn.Conv3d, 54, 54, 3, padding=1, groups=54, bias=False),
        _at((1, 32, 32, 32, 32), nn.MaxPool3d, 2),
        _at((1, 32, 32, 32, 32), nn.BatchNorm3d, 32),
    ),
    *_of(
        "multilayer perceptrons",
        _first((128, 64), nn.Linear, 64, 256),
        _at((128, 256), nn.Linear, 256, 256),
        _at((128, 256), nn.Linear, 256, 10),
        _first((1, 4), Policy, 4, 2),
        _first((64, 17), Policy, 17, 6),
    ),
    *_of(
        "sequence models",
        _at((512, 768), nn.Linear, 768, 3072),
        _at((512, 768), nn.LayerNorm, 768),
        _first((64, 28, 28), LSTM, 28, 128, batch_first=True),
        _first((16, 64, 64), GRU, 64, 64, batch_first=True),
        _first((16, 64), nn.Embedding, 10000, 128),
        _first((64, 8), nn.EmbeddingBag, 10000, 64),
        _at((16, 32, 64), SelfAttention, 64, 4, batch_first=True),
        _at((8, 128, 512), SelfAttention, 512, 8, batch_first=True),
        _at((512, 3072), nn.GELU),
        _at((512, 768), nn.Dropout, 0.1),
    ),
)
