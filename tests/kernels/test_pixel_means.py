"""Means over pixels have torch's bits, and gradients that are added in the memory order of the images."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import accelerated
from nano_loop.patching.operators import gives_kernels

pytestmark = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")

MEANS = {
    "pooled": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: x.mean((2, 3)),
    "negative": lambda x: x.mean((-1, -2), keepdim=True),
    "in fp32": lambda x: x.mean((2, 3), keepdim=True, dtype=torch.float32),
}
OTHERS = {"channels": lambda x: x.mean(1), "rows": lambda x: x.mean(2), "all": lambda x: x.mean()}


class Calls(nn.Module):
    """Has a convolution, so that `channels_last` applies, and calls a function."""

    def __init__(self, function):
        super().__init__()
        self.convolution, self.function = nn.Conv2d(2, 2, 1), function

    def forward(self, x):
        self.function(x)


def images(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.randn(3, 40, 7, 9).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()


def computed(function, x):
    """Return the mean, its gradient, and the gradient of a penalty on that gradient."""
    found = function(x)
    (gradient,) = torch.autograd.grad(found.float().exp().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.float().square().sum(), x)
    return found, gradient, second


def inside_and_outside(function, x):
    """Return the results inside a call of a set-up model, and outside it during the run."""
    inside = []
    model = Calls(lambda x: inside.extend(computed(function, x)))
    with accelerated(model, channels_last=True, verbose=False) as run:
        assert "channels_last" in run.report.applied
        model(x)
        return inside, computed(function, x)


@pytest.mark.parametrize("name", [*MEANS, *OTHERS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_means_and_gradients_have_torch_s_bits(name, dtype):
    function, x = (MEANS | OTHERS)[name], images(dtype)
    plain = computed(function, x)
    inside, outside = inside_and_outside(function, x)
    assert all(map(torch.equal, outside, plain))
    assert all(map(torch.equal, inside[:2], plain))
    # The second gradient is a sum over pixels in memory order, and divided afterwards.
    torch.testing.assert_close(inside[2], plain[2], rtol=1e-5 if dtype is torch.float32 else 2**-7, atol=0)
    for found in (inside, outside):
        assert [(each.dtype, each.shape) for each in found] == [(each.dtype, each.shape) for each in plain]
    assert outside[1].stride() == plain[1].stride()
    if name in MEANS:
        assert plain[1].is_contiguous()
        assert inside[1].stride()[2:] == (0, 0)  # expanded, not materialized
        for total in (inside[1] + x, x + inside[1], torch.relu(x) * inside[1]):
            assert total.is_contiguous(memory_format=torch.channels_last)
