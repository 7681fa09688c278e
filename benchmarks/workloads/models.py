"""The convolutional models of the workloads, written out, since torchvision does not work with this torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """ResNet (He et al. 2015); torchvision has no build for this torch without CUDA.

    Parameters
    ----------
    block : type
        The class of its blocks.
    expansion : int
        The ratio of a block's output channels to its middle channels.
    counts : tuple of int
        Blocks in each of the four stages.
    """

    def __init__(self, block: type, expansion: int, counts: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], 64
        for count, width in zip(counts, (64, 128, 256, 512), strict=True):
            for number in range(count):
                blocks.append(block(inputs, width, 2 if number == 0 and width != 64 else 1))
                inputs = expansion * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with padding, three levels down, from RGB to two classes.

    Parameters
    ----------
    width : int
        Channels of the level with the most pixels; each level down has twice as many.
    block : callable
        Creates the two convolutions of a level from the numbers of input and output channels. By default, with batch
        norms.
    """

    def __init__(self, width: int = 32, block: Callable[[int, int], nn.Module] | None = None) -> None:
        super().__init__()
        make = block or _two_convolutions
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(make(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        upwards = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in upwards)
        self.join = nn.ModuleList(make(2 * b, b) for _, b in upwards)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = []
        for number, down in enumerate(self.down):
            x = down(x if number == 0 else F.max_pool2d(x, 2))
            passed.append(x)
        for up, join, other in zip(self.up, self.join, passed[-2::-1], strict=True):
            x = join(torch.cat([other, up(x)], dim=1))
        return self.head(x)


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two convolutions with group norms of 8 groups, and a shortcut (He et al. 2015, Wu & He 2018)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class DCGAN(nn.Module):
    """Radford et al. 2016 (arXiv:1511.06434), for images of 64²: a generator and a discriminator.

    Parameters
    ----------
    width : int
        Channels of the layers next to the images.
    noise : int
        Channels of the generator's input.
    """

    def __init__(self, width: int = 64, noise: int = 100) -> None:
        super().__init__()
        self.noise = noise
        widths = [8 * width, 4 * width, 2 * width, width]
        up = [nn.ConvTranspose2d(noise, widths[0], 4, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
        for wide, narrow in pairwise(widths):
            up += [nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()]
        self.generator = nn.Sequential(*up, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
        down: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for wide, narrow in reversed([*pairwise(widths)]):
            down += [nn.Conv2d(narrow, wide, 4, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*down, nn.Conv2d(widths[0], 1, 4, bias=False), nn.Flatten(0))

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the discriminator's logits of real and generated images, and the generator's training logits."""
        made = self.generator(noise)
        return self.discriminator(images), self.discriminator(made.detach()), self.discriminator(made)
