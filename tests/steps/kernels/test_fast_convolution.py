"""Convolutions have their faster backward during the run, where it pays."""

import pytest
import torch
from torch import nn

from nano_loop.kernels.convolution import convolution
from nano_loop.runtime.objects.training_objects import TrainingObjects
from steps.kernels.cases import BY_NAME

gets_kernels = pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="torch does not hand out its kernels"
)


@pytest.fixture
def sums(monkeypatch):
    """Count the gradients of biases that are computed as sums, as those of transposed convolutions are."""
    counted, original = [], convolution._sum_of_pixels
    monkeypatch.setattr(convolution, "_sum_of_pixels", lambda gradient: counted.append(1) or original(gradient))
    return counted


def backward(layer):
    x = torch.ones(2, 4, 6, 6).bfloat16().contiguous(memory_format=torch.channels_last)
    layer(x).float().square().sum().backward()


@gets_kernels
def test_convolutions_use_it_during_the_run_only(step, sums):
    made, layer, teacher = (
        step(BY_NAME["fast_convolution"], precision="bf16"),
        *(nn.ConvTranspose2d(4, 4, 3).bfloat16() for _ in range(2)),
    )
    parts = TrainingObjects([layer])
    assert made.skip_reason(parts) is None
    made.apply(parts)
    made.apply(parts)
    backward(layer)
    assert len(sums) == 1
    backward(teacher)
    assert len(sums) == 1
    made.undo()
    backward(layer)
    assert len(sums) == 1
