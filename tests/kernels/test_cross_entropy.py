"""Cross-entropy in two passes accepts unusual logits and targets as torch does, and leaves unsupported calls to it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels.compared.losses import by_torch, logits_of, ours, with_gradient
from nano_loop.kernels.head.cross_entropy import KERNEL, cross_entropy


@pytest.fixture(autouse=True)
def compiler():
    assert KERNEL.unavailable is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [-math.inf, math.inf, math.nan, 3e38])
@pytest.mark.parametrize("everywhere", [False, True])
def test_odd_logits_give_what_they_give_in_torch(dtype, odd, everywhere):
    logits, target = logits_of(8, 1000, dtype)
    with torch.no_grad():
        logits[3, slice(None) if everywhere else 17] = odd
        logits[5, 999] = odd
    found, theirs = (with_gradient(each, logits, target, reduction="none") for each in (ours, by_torch))
    rtol = 2**-7 if dtype is torch.bfloat16 else 1e-6
    for mine, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=1e-6, equal_nan=True)


def test_masked_classes_get_no_gradient_at_all():
    logits, target = logits_of(4, 100)
    with torch.no_grad():
        logits[:, 50:] = -math.inf
    _, gradient = with_gradient(ours, logits, target % 50)
    assert not gradient[:, 50:].any()
    assert gradient[:, :50].all()


@pytest.mark.parametrize("reduction", [1, 2])
def test_gradient_that_a_program_writes_to_is_not_the_next_one(reduction):
    """As by a hook that clips it, if the graph is retained."""
    logits = torch.randn(64, 100, requires_grad=True)
    loss = cross_entropy(logits, torch.arange(64), None, reduction)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    expected = second.clone()
    for gradient in (first, second):
        gradient.zero_()
    assert torch.equal(torch.autograd.grad(loss, logits)[0], expected)


def test_in_inference_mode_it_keeps_nothing():
    logits, target = logits_of(5, 1200)
    with torch.inference_mode():
        assert not ours(logits.detach(), target).requires_grad


def test_what_torch_has_to_compute_is_left_to_it():
    logits, target = logits_of(6, 1000)
    assert cross_entropy(logits, target, torch.ones(1000)) is None
    assert cross_entropy(logits, F.one_hot(target, 1000).float()) is None
    assert cross_entropy(logits.view(2, 1000, 3), target.view(2, 3)) is None
    assert cross_entropy(logits.t().contiguous().t(), target) is None
    assert cross_entropy(logits, target.int()) is None
    assert cross_entropy(logits.double(), target) is None
    assert cross_entropy(logits, target[:5]) is None
    assert cross_entropy(logits[0], target[0]) is None
    assert cross_entropy(logits[:, :0].contiguous(), torch.full_like(target, -100)) is None
    assert cross_entropy(logits, target, label_smoothing=1.5) is None
    assert cross_entropy(torch.nn.Parameter(logits.detach()).to("meta"), target) is None
    for wrong in (1000, -1, 2**40):  # torch raises an error
        assert cross_entropy(logits, target.index_fill(0, torch.tensor([4]), wrong)) is None
    with FlopCounterMode(display=False):  # it counts torch's operators
        assert cross_entropy(logits, target) is None
