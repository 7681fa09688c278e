"""Convolutions with AMX accept parts of larger tensors, and models that round; see also `test_exactness`."""

import pytest
import torch
from torch import nn

from kernels.compared.convolutions import NHWC, case
from nano_loop import accelerated
from nano_loop.kernels.convolution import blocked_convolution as module
from nano_loop.patching.operators import gives_kernels

pytestmark = pytest.mark.skipif(not module.KERNEL.uses_amx, reason="the CPU has no AMX")


def test_parts_of_larger_tensors_are_read_where_they_lie():
    whole = case(images=4, channels=32)
    inputs = torch.full((8, 9, 11, 50), torch.nan).permute(0, 3, 1, 2)[::2, 5:37]
    weight = torch.full((24, 40, 3, 3), torch.nan)[:, 8:]
    inputs.copy_(whole[0]), weight.copy_(whole[1])
    computed, expected = (
        module.convolution(*tensors, None, whole[3], (9, 11)) for tensors in ((inputs, weight), whole[:2])
    )
    assert torch.equal(computed, expected)


def test_places_that_would_overflow_are_not_computed_in_blocks(monkeypatch):
    inputs, weight, _, geometry = case()
    assert not module.supports(inputs, weight, geometry._replace(dilation=(2**27, 1)), (9, 11))
    monkeypatch.setattr(module, "_FARTHEST_OUTPUT", weight.stride(0) - 1)
    assert not module.supports(inputs, weight, geometry, (9, 11))


@pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
def test_models_that_round_have_their_convolutions_and_gradients_in_blocks(called):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 64, 3, 2, padding=1))
    x = torch.randn(24, 32, 32, 32)
    options = {"precision": "bf16-products", "channels_last": True, "tune_operators": False, "verbose": False}
    expected = model(x)
    with accelerated(model, **options):
        out = model(x.clone().requires_grad_())
        out.backward(torch.randn(out.shape).contiguous(memory_format=NHWC))
    assert (out - expected).norm() < 0.01 * expected.norm()
    # Both forwards, and the input gradient of the one without a stride.
    assert called.count("convolution") == 3
    assert called.count("weight_gradient") == 2
