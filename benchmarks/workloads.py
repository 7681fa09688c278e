"""The workloads: a model, its optimizer, a batch, and the loss, each as a user would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Workload:
    """What one training step needs.

    `loss` takes the model and a batch, and calls the model as the loop would.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    images: bool = False


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions (He et al. 2015), with the stride in the 3×3 one (v1.5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x), inplace=True)


class ResNet50(nn.Module):
    """ResNet-50 v1.5 with its 25,557,032 parameters; torchvision has no build for this torch without CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], 64
        for count, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
            for number in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if number == 0 and width != 64 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def resnet50() -> Workload:
    """ResNet-50, 16 images of 224², SGD with momentum."""
    model = ResNet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    batch = torch.randn(16, 3, 224, 224), torch.randint(1000, (16,))
    return Workload(model, optimizer, [batch], _classify, images=True)


def mlp() -> Workload:
    """Three linear layers on a batch of 128 rows of 64 numbers, AdamW."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(128, 64), torch.randint(10, (128,))
    return Workload(model, optimizer, [batch], _classify)


WORKLOADS: dict[str, Callable[[], Workload]] = {"resnet50": resnet50, "mlp": mlp}
