"""The custom operators keep torch's rules for operators, and compute what the kernels do outside of a graph."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import nano_loop.compile.operators  # noqa: F401
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.loss.cross_entropy import KERNEL

OURS = torch.ops.nano_loop


CPU = {"device": torch.device("cpu")}


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


@pytest.mark.skipif(blocked_attention.KERNEL.unavailable is not None, reason=str(blocked_attention.KERNEL.unavailable))
@pytest.mark.parametrize(
    ("masked", "dropout_p", "causal"), [(False, 0.0, True), (True, 0.0, False), (True, 0.25, False)]
)
def test_attention_keeps_torchs_rules_for_operators_and_computes_as_outside_of_a_graph(masked, dropout_p, causal):
    mask = torch.rand(64, 64) < 0.9 if masked else None
    found = []
    for function in (OURS.blocked_attention, blocked_attention.blocked_attention):
        tensors = three()
        torch.manual_seed(0)
        if function is OURS.blocked_attention:
            arguments = *tensors, mask, blocked_attention.drawn(*tensors[:2], dropout_p), dropout_p, causal, 0.25
            opcheck(function, arguments)
            out = function(*arguments)[0]
        else:
            out = function(*tensors, mask, dropout_p, causal, 0.25)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    assert all(map(torch.equal, *found))


def test_masks_do_so_too_and_are_those_of_torchs_generator():
    opcheck(OURS.kept, ((3, 5), (5, 1), 0.5, 0), CPU, test_utils=("test_schema", "test_faketensor"))
    torch.manual_seed(3)
    found = OURS.kept((100, 200), (200, 1), 0.7, 0, **CPU), torch.rand(1)
    torch.manual_seed(3)
    assert all(map(torch.equal, found, (torch.empty(100, 200).bernoulli_(0.7).to(torch.uint8), torch.rand(1))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_keeps_torchs_rules_for_operators(layout, dtype):
    opcheck(OURS.batch_norm, (*images(layout, dtype), 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_keeps_torchs_rules_for_operators(dtype):
    assert KERNEL.unavailable is None
    logits = torch.randn(6, 50).to(dtype).requires_grad_()
    opcheck(OURS.cross_entropy, (logits, torch.randint(50, (6,)), -100, 0.1))


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
