"""tanh and GELU by tanh are as exact as torch's for every number, and leave to torch what they do not do."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F

from nano_loop.kernels.activation import activations
from nano_loop.patching.operators.operators import gives_kernels

pytestmark = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")

EVERY_NUMBER = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def slope(x):
    return torch.ops.aten.gelu_backward(torch.full_like(x, 0.7), x, approximate="tanh")


FUNCTIONS = {"tanh": torch.tanh, "gelu": gelu, "gelu_backward": slope}


@pytest.fixture(autouse=True)
def in_torchs_place(monkeypatch):
    """Put the functions in torch's place, as for the calls of a set-up model."""
    monkeypatch.setattr(activations, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(activations, "belongs_to_set_up_model", lambda: True)
    with ExitStack() as stack:
        for replacement in activations.REPLACEMENTS:
            stack.enter_context(replacement.in_force())
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number_is_as_exact_as_torchs(called, name, monkeypatch):
    finite = EVERY_NUMBER[EVERY_NUMBER.isfinite()]
    ours = FUNCTIONS[name](finite)
    assert len(called) == 1
    monkeypatch.setattr(activations, "belongs_to_set_up_model", lambda: False)
    exact, torchs = FUNCTIONS[name](finite.double()), FUNCTIONS[name](finite)
    known = exact.isfinite() & torchs.isfinite()
    assert ours[known].isfinite().all()
    middle = known & (exact.abs() > 1e-6) & (exact.abs() < 1e30)
    mine, theirs = ((each.double() - exact)[middle] / exact[middle] for each in (ours, torchs))
    assert mine.square().mean().sqrt() <= 1.2 * theirs.square().mean().sqrt()
    assert mine.abs().max() <= 2**-7  # far in the tail, where torch's has no digit left


@pytest.mark.parametrize("name", ["tanh", "gelu"])
def test_what_is_no_number_stays_none(called, name):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=torch.bfloat16)
    found = FUNCTIONS[name](special)
    assert len(called) == 1
    assert found[0].isnan()
    assert found[1] == (1 if name == "tanh" else float("inf"))
    assert found[3] == 0
    assert found[4].signbit()


@pytest.mark.parametrize("shape", [(7,), (3, 5000), (2, 3, 4, 5)])
def test_shapes_and_layouts_are_kept(called, shape):
    x = torch.randn(shape).bfloat16()
    layouts = [x, x.mT.contiguous().mT] if x.dim() > 1 else [x]
    layouts += [x.to(memory_format=torch.channels_last)] if x.dim() == 4 else []
    for each in layouts:
        found = torch.tanh(each)
        assert found.stride() == each.stride()
        assert (found.float() - each.float().tanh()).abs().max() < 0.01
    assert called == ["tanh_forward"] * len(layouts)


def test_results_do_not_depend_on_the_number_of_threads(for_each_number):
    x = torch.randn(20_001).bfloat16()
    assert all(map(torch.equal, *for_each_number(lambda: [function(x) for function in FUNCTIONS.values()], 1, 2)))


def test_other_calls_are_torchs(called):
    x = torch.randn(64, 64)
    F.gelu(x.bfloat16())  # by the error function
    torch.tanh(x)
    torch.tanh(x.bfloat16()[:, ::2])
    torch.ops.aten.gelu_backward(x.bfloat16().t(), x.bfloat16(), approximate="tanh")
    assert called == []


def test_derivatives_are_torchs_in_fp64(called):
    x = torch.linspace(-4, 4, 300).bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(gelu(x).float().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x)
    exact = x.detach().double().requires_grad_()
    (first_exact,) = torch.autograd.grad(gelu(exact).sum(), exact, create_graph=True)
    (second_exact,) = torch.autograd.grad(first_exact.sum(), exact)
    torch.testing.assert_close(first.double(), first_exact, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(second.double(), second_exact, rtol=0.02, atol=0.02)
    assert called[:2] == ["gelu_forward", "gelu_backward"]
    mapped = torch.func.vmap(torch.func.grad(lambda each: gelu(each).float()))(x.detach())
    torch.testing.assert_close(mapped, first.detach(), rtol=0.02, atol=0.02)
