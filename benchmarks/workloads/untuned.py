"""Public models on which no limit in nano_loop's source was tuned: five of transformers, and a U-Net with group norm.

All of them have random weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.models import ResidualBlock, UNet
from benchmarks.workloads.workload import Workload


def mobilenet(small: bool) -> Workload:
    """MobileNetV2, 32 images of 224² (small: 4 of 96²), SGD with momentum."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    model = MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000))
    return _classification(model, *((4, 96) if small else (32, 224)))


def efficientnet(small: bool) -> Workload:
    """EfficientNet-B0, 32 images of 224² (small: 4 of 96²), SGD with momentum."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    scale = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "dropout_rate": 0.2}
    model = EfficientNetForImageClassification(EfficientNetConfig(**scale, image_size=224, num_labels=1000))
    return _classification(model, *((4, 96) if small else (32, 224)))


def convnext(small: bool) -> Workload:
    """ConvNeXt-T, 8 images of 224² (small: 2 of 96², and a block in each stage), AdamW."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    depths = [1, 1, 1, 1] if small else [3, 3, 9, 3]
    model = ConvNextForImageClassification(ConvNextConfig(depths=depths, num_labels=1000))
    work = _classification(model, *((2, 96) if small else (8, 224)))
    work.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return work


def _classification(model: nn.Module, count: int, side: int) -> Workload:
    batch = torch.randn(count, 3, side, side), torch.randint(1000, (count,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return Workload(model, optimizer, [batch], _loss_of_images, images=True, steps=6)


def _loss_of_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


def distilbert(small: bool) -> Workload:
    """DistilBERT with its dropout, 8 sequences of 128 tokens, AdamW; small, 2 of 32, 1 of its 6 layers, 2,000 words."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    layers, words, count, length = (1, 2000, 2, 32) if small else (6, 30522, 8, 128)
    model = DistilBertForMaskedLM(DistilBertConfig(vocab_size=words, n_layers=layers))
    return _sequences(model, torch.randint(words, (count, length)))


def t5(small: bool) -> Workload:
    """T5-small with its dropout, 8 pairs of 128 tokens, AdamW; small, 2 of 32, 1 of its 6 layers, 2,000 words."""
    from transformers import T5Config, T5ForConditionalGeneration

    layers, words, count, length = (1, 2000, 2, 32) if small else (6, 32128, 8, 128)
    config = T5Config(vocab_size=words, num_layers=layers, decoder_start_token_id=0)
    return _sequences(T5ForConditionalGeneration(config), torch.randint(words, (count, length)))


def _sequences(model: nn.Module, tokens: Tensor) -> Workload:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, optimizer, [tokens], _loss_of_tokens, steps=6)


def _loss_of_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def group_norm_unet(small: bool) -> Workload:
    """A U-Net of residual blocks with group norm, three levels, 8 images of 160² (small: 2 of 32²), AdamW."""
    model = UNet(8 if small else 32, ResidualBlock)
    count, side = (2, 32) if small else (8, 160)
    batch = torch.randn(count, 3, side, side), torch.randint(2, (count, side, side))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, optimizer, [batch], _loss_of_masks, images=True, steps=6)


def _loss_of_masks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
