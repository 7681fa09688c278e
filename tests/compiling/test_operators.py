"""The custom operators keep torch's rules for operators, are as exact as torch's functions, and draw the same masks."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import nano_loop.compiling.operators  # noqa: F401
from nano_loop.kernels import blocked_attention
from nano_loop.kernels.cross_entropy import KERNEL

OURS = torch.ops.nano_loop


def bf16(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().requires_grad_()


def three(shape=(2, 2, 64, 32)):
    return [bf16(*shape, seed=seed) for seed in range(3)]


def images(layout=torch.contiguous_format, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 6, 5, 5, generator=generator).to(dtype).contiguous(memory_format=layout)
    weight, bias = (torch.randn(6, generator=generator).requires_grad_() for _ in range(2))
    return images.requires_grad_(), weight, bias


def test_attention_keeps_torchs_rules_for_operators():
    mask = torch.rand(64, 64) < 0.9
    opcheck(OURS.attention, (*three(), None, 0.0, 0.25, 0))
    opcheck(OURS.attention, (*three(), mask, 0.0, 0.25, 0))


def test_attention_with_dropout_does_so_too():
    # What it draws differs between calls, so that its values cannot be compared.
    opcheck(OURS.attention, (*three(), None, 0.25, 0.25, 0), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(blocked_attention.KERNEL.unavailable is not None, reason=str(blocked_attention.KERNEL.unavailable))
def test_attention_in_blocks_does_so_too_and_computes_as_outside_of_a_graph():
    mask = torch.rand(64, 64) < 0.9
    opcheck(OURS.blocked_attention, (*three(), None, 0.0, True, 0.25, 0))
    opcheck(OURS.blocked_attention, (*three(), mask, 0.0, False, 0.25, 0))
    checked = ("test_schema", "test_faketensor")
    opcheck(OURS.blocked_attention, (*three(), None, 0.25, False, 0.25, 0), test_utils=checked)
    found = []
    for function in (
        lambda *tensors: OURS.blocked_attention(*tensors, mask, 0.25, False, 0.25, 0)[0],
        lambda *tensors: blocked_attention.blocked_attention(*tensors, mask, 0.25, False, 0.25),
    ):
        tensors = three()
        torch.manual_seed(0)
        out = function(*tensors)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    assert all(map(torch.equal, *found))


def test_masks_do_so_too():
    arguments = (3, 5), (5, 1), 0.5, 0
    opcheck(OURS.kept, arguments, {"device": "cpu"}, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_does_so_too(layout, dtype):
    opcheck(OURS.batch_norm, (*images(layout, dtype), 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_does_so_too(dtype):
    assert KERNEL.unavailable is None
    logits = torch.randn(6, 50).to(dtype).requires_grad_()
    opcheck(OURS.cross_entropy, (logits, torch.randint(50, (6,)), -100, 0.1))


def rms(found, exact):
    return (found.double() - exact).square().mean().sqrt().item()


@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients_are_near_those_in_fp64(masked):
    tensors, upstream = three((2, 3, 100, 32)), bf16(2, 3, 100, 32, seed=9).detach()
    mask = torch.ones(100, 100, dtype=torch.bool).tril() if masked else None
    exact = [each.detach().double().requires_grad_() for each in tensors]
    out = OURS.attention(*tensors, mask, 0.0, 0.2, 0)[0]
    expected = F.scaled_dot_product_attention(*exact, mask, scale=0.2)
    torchs = [each.detach().requires_grad_() for each in tensors]
    of_torch = F.scaled_dot_product_attention(*torchs, mask, scale=0.2)
    found = [out, *torch.autograd.grad(out, tensors, upstream)]
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    theirs = [of_torch, *torch.autograd.grad(of_torch, torchs, upstream)]
    for ours, true, torch_s in zip(found, wanted, theirs, strict=True):
        assert rms(ours, true) < 1.5 * rms(torch_s, true)


def test_gradients_of_attention_are_of_the_mask_that_was_drawn():
    """Rows of the identity show the mask: a value's gradient is there where its weight was kept."""
    query, key = (bf16(1, 1, 64, 32, seed=seed) for seed in range(2))
    value = torch.eye(64).bfloat16()[None, None].requires_grad_()
    torch.manual_seed(1)
    out, _, kept = OURS.attention(query, key, value, None, 0.5, 0.1, 0)
    assert torch.equal(out[0, 0] != 0, kept[0] != 0)
    (gradient,) = torch.autograd.grad(out, value, torch.eye(64).bfloat16()[None, None])
    assert torch.equal(gradient[0, 0] != 0, kept[0].T != 0)


def test_masks_are_those_of_torchs_generator_and_repeat_with_the_seed():
    torch.manual_seed(3)
    kept = OURS.kept((100, 200), (200, 1), 0.7, 0, device=torch.device("cpu"))
    then = torch.rand(1)
    torch.manual_seed(3)
    expected = torch.empty(100, 200).bernoulli_(0.7)
    assert torch.equal(kept, expected.to(torch.uint8))
    assert torch.equal(then, torch.rand(1))
    assert abs(kept.float().mean().item() - 0.7) < 0.01


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_and_its_gradients_are_those_of_torch(layout):
    given, upstream = images(layout), torch.randn(4, 6, 5, 5)
    ours, *statistics = OURS.batch_norm(*given, 1e-5)
    theirs = F.batch_norm(given[0], None, None, *given[1:], training=True, eps=1e-5)
    assert torch.equal(ours, theirs)
    for one, other in zip(*(torch.autograd.grad(each, given, upstream) for each in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)
    assert not any(each.requires_grad for each in statistics)


def test_target_that_is_no_class_is_torchs_error():
    with pytest.raises(IndexError, match="Target 50 is out of bounds"):
        OURS.cross_entropy(torch.randn(2, 50), torch.tensor([0, 50]), -100, 0.0)
