"""tanh and GELU's tanh form are as exact as torch's for every bf16 value, and torch computes unsupported calls."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F

from nano_loop.kernels import activations, override
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.ownership import NO_RULES

pytestmark = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")

EVERY_NUMBER = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def slope(x):
    return torch.ops.aten.gelu_backward(torch.full_like(x, 0.7), x, approximate="tanh")


FUNCTIONS = {"tanh": torch.tanh, "gelu": gelu, "gelu_backward": slope}


def belong(monkeypatch, to_set_up_model):
    """Let calls belong to a set-up model, or to none."""
    monkeypatch.setattr(override, "rules_now", lambda: NO_RULES if to_set_up_model else None)


@pytest.fixture(autouse=True)
def in_torchs_place(monkeypatch):
    """Replace torch's functions, as for the calls of a set-up model."""
    monkeypatch.setattr(activations, "MIN_ELEMENTS", 1)
    belong(monkeypatch, True)
    with ExitStack() as stack:
        for replaced in activations.OVERRIDES:
            stack.enter_context(replaced.in_force())
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number_is_as_exact_as_torchs(called, monkeypatch, name):
    finite = EVERY_NUMBER[EVERY_NUMBER.isfinite()]
    ours = FUNCTIONS[name](finite)
    assert len(called) == 1
    belong(monkeypatch, False)
    exact, torchs = FUNCTIONS[name](finite.double()), FUNCTIONS[name](finite)
    known = exact.isfinite() & torchs.isfinite()
    assert ours[known].isfinite().all()
    middle = known & (exact.abs() > 1e-6) & (exact.abs() < 1e30)
    mine, theirs = (((each.double() - exact) / exact.abs())[middle] for each in (ours, torchs))
    assert mine.square().mean().sqrt() <= 1.2 * theirs.square().mean().sqrt()
    # Far in the tail, torch's result has no correct digit left.
    assert mine.abs().max() <= 2**-7


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_number_stays_none(called, monkeypatch, name):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=torch.bfloat16)
    found = FUNCTIONS[name](special)
    assert len(called) == 1
    belong(monkeypatch, False)
    torchs = FUNCTIONS[name](special)
    torch.testing.assert_close(found, torchs, equal_nan=True)
    # Compared with fp64, because torch's tanh of a negative zero in bf16 is positive on ARM.
    assert found[3:].signbit().equal(FUNCTIONS[name](special[3:].double()).signbit())


@pytest.mark.parametrize("shape", [(7,), (3, 5000), (2, 3, 4, 5)])
def test_shapes_and_layouts_are_kept(called, shape):
    x = torch.randn(shape).bfloat16()
    layouts = [x, x.mT.contiguous().mT] if x.dim() > 1 else [x]
    layouts += [x.to(memory_format=torch.channels_last)] if x.dim() == 4 else []
    for each in layouts:
        found = torch.tanh(each)
        assert found.stride() == each.stride()
        torch.testing.assert_close(found, each.double().tanh().bfloat16())
    assert called == ["tanh_forward"] * len(layouts)


def test_results_do_not_depend_on_the_number_of_threads(for_each_number):
    x = torch.randn(20_001).bfloat16()
    assert all(map(torch.equal, *for_each_number(lambda: [function(x) for function in FUNCTIONS.values()], 1, 2)))


def test_other_calls_are_torchs(called):
    x = torch.randn(64, 64).bfloat16()
    F.gelu(x)  # with the error function
    torch.ops.aten.gelu_backward(x, x)
    torch.tanh(x[:, ::2])
    torch.tanh(x[:0])
    torch.ops.aten.gelu_backward(x.t(), x, approximate="tanh")
    for dtype in (torch.float32, torch.float64):
        for function in FUNCTIONS.values():
            function(x.to(dtype))
    assert called == []
