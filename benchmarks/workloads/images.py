"""Images: two ResNets, a vision transformer and a U-Net, on random pixels or on JPEG files."""

from __future__ import annotations

import io

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.workloads.models import DCGAN, BasicBlock, Bottleneck, ResNet, UNet
from benchmarks.workloads.workload import Workload


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def resnet50(small: bool) -> Workload:
    """ResNet-50, 16 images of 224² (small: 8 of 128²), SGD with momentum."""
    model = ResNet(Bottleneck, 4, (3, 4, 6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    count, side = (8, 128) if small else (16, 224)
    batch = torch.randn(count, 3, side, side), torch.randint(1000, (count,))
    return Workload(model, optimizer, [batch], _classify, images=True, steps=4 if small else 6)


def vit(small: bool) -> Workload:
    """ViT-S/16 of transformers, 16 images of 224², AdamW; small, 2 of its 12 layers."""
    from transformers import ViTConfig, ViTForImageClassification

    layers = 2 if small else 12
    config = ViTConfig(
        hidden_size=384, num_hidden_layers=layers, num_attention_heads=6, intermediate_size=1536, num_labels=1000
    )
    model = ViTForImageClassification(config)
    batch = torch.randn(16, 3, 224, 224), torch.randint(1000, (16,))
    return Workload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        [batch],
        lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss,
        steps=4 if small else 6,
    )


def unet(small: bool) -> Workload:
    """A U-Net of three levels, 4 images of 128², AdamW."""
    model = UNet()
    batch = torch.randn(4, 3, 128, 128), torch.randint(2, (4, 128, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, optimizer, [batch], _classify, images=True, steps=6 if small else 20)


def dcgan(small: bool) -> Workload:
    """A DCGAN on 64 images of 64² (small: 16), one step of both networks, Adam."""
    model = DCGAN()
    count = 16 if small else 64
    batch = torch.rand(count, 3, 64, 64) * 2 - 1, torch.randn(count, model.noise, 1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
    return Workload(model, optimizer, [batch], _adversarial, images=True, steps=6)


def _adversarial(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Sum the losses of the discriminator, on real and generated images, and of the generator."""
    real, fake, deceived = model(*batch)
    ones, zeros = torch.ones_like(real), torch.zeros_like(fake)
    loss = F.binary_cross_entropy_with_logits
    return loss(real, ones) + loss(fake, zeros) + loss(deceived, ones)


class JpegFiles(Dataset[tuple[Tensor, int]]):
    """The contents of JPEG files, each with its class, decoded on access.

    They are in memory: a process of the benchmarks may be killed, and would leave files behind.
    """

    def __init__(self, files: list[tuple[bytes, int]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        content, label = self.files[index]
        with Image.open(io.BytesIO(content)) as image:
            pixels = torch.from_numpy(numpy.asarray(image.convert("RGB")).copy())
        return pixels.permute(2, 0, 1).float() / 127.5 - 1, label


def resnet18_folder(small: bool) -> Workload:
    """ResNet-18, 16 images of 160² a batch, decoded from JPEG files by the `DataLoader`; SGD with momentum."""
    from PIL import Image

    files = []
    side, noise = 96 if small else 160, numpy.random.default_rng(0)
    for number in range(128):
        file = io.BytesIO()
        coarse = noise.integers(0, 256, (8, 8, 3), dtype=numpy.uint8)  # noise of single pixels is not like a photograph
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG")
        files.append((file.getvalue(), number % 10))
    model = ResNet(BasicBlock, 1, (2, 2, 2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(JpegFiles(files), 16, shuffle=True)
    return Workload(model, optimizer, loader, _classify, images=True, steps=(1 if small else 3) * len(loader))
