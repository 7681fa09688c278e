"""tanh and GELU are as exact as torch's for every number, and leave to torch what they do not do."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F

from nano_loop.kernels import fp32
from nano_loop.kernels.activation import activations
from nano_loop.patching.operators.operators import gives_kernels

pytestmark = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def every_number(dtype):
    """Return every number in bf16, or one of fp32 behind each."""
    numbers = torch.arange(1 << 16, dtype=torch.int32)
    if dtype is torch.bfloat16:
        return numbers.to(torch.int16).view(dtype)
    others = torch.randint(1 << 16, numbers.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return (numbers << 16 | others).view(dtype)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def slope(x):
    return torch.ops.aten.gelu_backward(torch.full_like(x, 0.7), x, approximate="tanh")


def slope_by_error_function(x):
    return torch.ops.aten.gelu_backward(torch.full_like(x, 0.7), x)


FUNCTIONS = {"tanh": torch.tanh, "gelu": gelu, "gelu_backward": slope}
IN_FP32 = FUNCTIONS | {"exact_gelu_backward": slope_by_error_function}
CASES = [(torch.bfloat16, name) for name in FUNCTIONS] + [(torch.float32, name) for name in IN_FP32]


def belong(monkeypatch, to_set_up_model):
    """Let calls belong to a set-up model, which takes the functions for fp32, or to none."""
    monkeypatch.setattr(activations, "belongs_to_set_up_model", lambda: to_set_up_model)
    monkeypatch.setattr(activations, "rule_for", lambda _: fp32.always if to_set_up_model else None)


@pytest.fixture(autouse=True)
def in_torchs_place(monkeypatch):
    """Put the functions in torch's place, as for the calls of a set-up model."""
    monkeypatch.setattr(activations, "MIN_ELEMENTS", 1)
    belong(monkeypatch, True)
    with ExitStack() as stack:
        for replacement in activations.REPLACEMENTS:
            stack.enter_context(replacement.in_force())
        yield


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=str)
def test_every_number_is_as_exact_as_torchs(called, monkeypatch, dtype, name):
    numbers = every_number(dtype)
    finite = numbers[numbers.isfinite()]
    ours = IN_FP32[name](finite)
    assert len(called) == 1
    belong(monkeypatch, False)
    exact, torchs = IN_FP32[name](finite.double()), IN_FP32[name](finite)
    known = exact.isfinite() & torchs.isfinite()
    assert ours[known].isfinite().all()
    middle = known & (exact.abs() > 1e-6) & (exact.abs() < 1e30)
    # In fp32 the error is relative, but near a zero that is none of x: torch's has no digits there.
    scale = exact.abs() if dtype is torch.bfloat16 else exact.abs().maximum(finite.double().abs().clamp(max=0.1))
    mine, theirs = ((each.double() - exact)[middle] / scale[middle] for each in (ours, torchs))
    assert mine.square().mean().sqrt() <= 1.2 * theirs.square().mean().sqrt()
    # In bf16, far in the tail, torch's has no digit left.
    assert mine.abs().max() <= (2**-7 if dtype is torch.bfloat16 else 2**-19)


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=str)
def test_what_is_no_number_stays_none(called, monkeypatch, dtype, name):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=dtype)
    found = IN_FP32[name](special)
    assert len(called) == 1
    belong(monkeypatch, False)
    torchs = IN_FP32[name](special)
    torch.testing.assert_close(found, torchs, equal_nan=True)
    assert found[3:].signbit().equal(torchs[3:].signbit())


@DTYPES
@pytest.mark.parametrize("shape", [(7,), (3, 5000), (2, 3, 4, 5)])
def test_shapes_and_layouts_are_kept(called, shape, dtype):
    x = torch.randn(shape).to(dtype)
    layouts = [x, x.mT.contiguous().mT] if x.dim() > 1 else [x]
    layouts += [x.to(memory_format=torch.channels_last)] if x.dim() == 4 else []
    for each in layouts:
        found = torch.tanh(each)
        assert found.stride() == each.stride()
        torch.testing.assert_close(found, each.double().tanh().to(dtype))
    assert called == [f"tanh_forward_{activations.KINDS[dtype]}"] * len(layouts)


@DTYPES
def test_results_do_not_depend_on_the_number_of_threads(for_each_number, dtype):
    x = torch.randn(20_001).to(dtype)
    assert all(map(torch.equal, *for_each_number(lambda: [function(x) for function in IN_FP32.values()], 1, 2)))


@DTYPES
def test_other_calls_are_torchs(called, dtype):
    x = torch.randn(64, 64).to(dtype)
    F.gelu(x)  # by the error function
    if dtype is torch.bfloat16:
        slope_by_error_function(x)
    torch.tanh(x[:, ::2])
    torch.tanh(x.double())
    torch.tanh(x[:0])
    torch.ops.aten.gelu_backward(x.t(), x, approximate="tanh")
    assert called == []


@DTYPES
@pytest.mark.parametrize("function", [gelu, F.gelu])
def test_derivatives_are_torchs_in_fp64(called, dtype, function):
    x = torch.linspace(-4, 4, 300).to(dtype).requires_grad_()
    (first,) = torch.autograd.grad(function(x).float().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x)
    exact = x.detach().double().requires_grad_()
    (first_exact,) = torch.autograd.grad(function(exact).sum(), exact, create_graph=True)
    (second_exact,) = torch.autograd.grad(first_exact.sum(), exact)
    if dtype is torch.float32:
        bounds = bounds_of_second = {"rtol": 1e-5, "atol": 1e-6}
    else:
        bounds, bounds_of_second = {"rtol": 2**-7, "atol": 1e-3}, {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(first.double(), first_exact, **bounds)
    torch.testing.assert_close(second.double(), second_exact, **bounds_of_second)
    mapped = torch.func.vmap(torch.func.grad(lambda each: function(each).float()))(x.detach())
    torch.testing.assert_close(mapped, first.detach(), **bounds_of_second)
    kind = activations.KINDS[dtype]
    if function is gelu:
        assert called[0] == f"gelu_forward_{kind}"
        assert f"gelu_backward_{kind}" in called
    else:
        assert called == (["exact_gelu_backward_float"] if dtype is torch.float32 else [])
