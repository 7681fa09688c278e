"""Products of fp32 matrices are as exact as torch's, for any sizes and strides, and are computed by a rule alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps.kernels.cases import compute_in_c
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from nano_loop import accelerated
from nano_loop.kernels.linear import fp32_product as module
from nano_loop.patching.operators.operators import gives_kernels
from nano_loop.steps.kernels import models

pytestmark = pytest.mark.skipif(module.KERNEL.unavailable is not None, reason=str(module.KERNEL.unavailable))
in_runs = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")

#: The order of a matrix in memory: by rows, by columns, and with gaps between rows, columns or both.
ORDERS = ("rows", "columns", "rows with gaps", "columns with gaps", "gaps")


def matrix(rows, columns, order, generator):
    step, row = {"rows": (1, 1), "columns": (1, 1), "gaps": (2, 3)}.get(order, (1, 3))
    sizes = (columns, rows) if "columns" in order else (rows, columns)
    made = torch.randn(sizes[0] * row, sizes[1] * step + (row > 1), generator=generator)
    made = made[::row, : sizes[1] * step : step]
    return made.t() if "columns" in order else made


def factors(rows, depth, columns, a="rows", b="rows", seed=0):
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(columns, generator=generator)
    return matrix(rows, depth, a, generator), matrix(depth, columns, b, generator), bias


def error(computed, exact):
    return (computed.double() - exact).square().mean().sqrt().item()


def assert_as_exact_as_torch(a, b, bias=None):
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    torchs = a @ b if bias is None else torch.addmm(bias, a, b)
    ours = module.product(a, b, bias)
    assert ours.shape == torchs.shape
    assert ours.is_contiguous()
    assert error(ours, exact) <= 1.2 * error(torchs, exact) + 2**-25 * exact.square().mean().sqrt()
    return ours


@settings(max_examples=120, deadline=None)
@given(
    rows=st.integers(1, 150),
    depth=st.integers(1, 150),
    columns=st.integers(1, 150),
    a=st.sampled_from(ORDERS),
    b=st.sampled_from(ORDERS),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_sizes_and_strides_are_as_exact_as_torch(with_bias, **sizes):
    a, b, bias = factors(**sizes)
    assert_as_exact_as_torch(a, b, bias if with_bias else None)


#: A depth of several blocks, more rows than are packed at a time, and many columns.
LARGE = [(70, 1500, 130), (300, 33, 400), (2000, 300, 65), (5, 600, 1001)]


@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_large_products_do_not_depend_on_the_number_of_threads(for_each_number, sizes):
    for a, b in itertools.product(("rows", "columns", "gaps"), repeat=2):
        x, y, bias = factors(*sizes, a, b)
        results = for_each_number(lambda x=x, y=y, bias=bias: assert_as_exact_as_torch(x, y, bias), 1, 2, 3, 4)
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_nothing_behind_the_result_is_written(behind_memory):
    for sizes in ((7, 30, 65), (1, 1, 1), (13, 300, 17)):
        module.product(*factors(*sizes))
    assert behind_memory
    assert all((memory == 7).all() for memory in behind_memory)


def test_what_is_no_number_stays_in_its_row_and_column():
    a, b, bias = factors(9, 40, 70)
    a[3, 5], b[6, 64] = torch.nan, torch.inf
    is_number = module.product(a, b, bias).isfinite()
    assert is_number.equal(torch.addmm(bias, a, b).isfinite())


class Layers(nn.Module):
    """Layers with and without a bias, of a batch of sequences; the first one may be recomputed."""

    def __init__(self, recomputes=False):
        super().__init__()
        self.first, self.last, self.recomputes = nn.Linear(40, 70), nn.Linear(70, 33, bias=False), recomputes

    def forward(self, x):
        first = checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)
        return self.last(first.tanh())


@pytest.fixture
def every_product(monkeypatch):
    """Let the function compute every product of a run that may be in C."""
    monkeypatch.setattr(module, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(models, "LARGE_IN_FP32", 1)
    compute_in_c(monkeypatch)


def results(model, x, **options):
    """Return an output, its gradients, and those of the gradients' squares, each in a run."""
    with accelerated(model, verbose=False, tune_operators=False, fast_dropout=False, **options):
        out = model(x)
        leaves = [x, *model.parameters()]
        gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in gradients), leaves)
    return [one.detach() for one in (out, *gradients, *second)]


@in_runs
@pytest.mark.parametrize("recomputes", [False, True])
def test_runs_have_the_gradients_of_plain_torch_and_exact_ones_its_bits(called, every_product, recomputes):
    torch.manual_seed(0)
    model, x = Layers(recomputes), torch.randn(3, 20, 40).requires_grad_()
    ours = results(model, x)
    assert set(called) == {"fp32_product"}
    called.clear()
    exact, plain = results(model, x, exact=True), results(model, x, fast_linear=False)
    assert not called
    assert all(map(torch.equal, exact, plain))
    for mine, other in zip(ours, plain, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


def tangent(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in torch's forward mode
@in_runs
def test_transforms_of_torch_func_and_hooks_see_the_same(called, every_product):
    torch.manual_seed(0)
    model, x, seen = Layers(), torch.randn(20, 40), []

    def of_row(row):
        return model(row).square().sum()

    expected = torch.func.vmap(torch.func.grad(of_row))(x)
    slope = tangent(model, x)
    with accelerated(model, verbose=False, tune_operators=False, fast_dropout=False):
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(of_row))(x), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tangent(model, x), slope, rtol=1e-4, atol=1e-5)
        model.first.weight.register_hook(seen.append)
        model(x).square().sum().backward()
    torch.testing.assert_close(seen[0], model.first.weight.grad, rtol=0, atol=0)
    assert "fp32_product" in called


@in_runs
@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, bias: torch.addmm(bias, a, b, beta=2),
        lambda a, b, bias: torch.addmm(bias, a, b, alpha=0.5),
        lambda a, b, bias: torch.addmm(a, a, b),
        lambda a, b, bias: torch.addmm(bias[:1], a, b),
        lambda a, b, bias: torch.mm(a, b, out=torch.empty(64, 64)),
        lambda a, b, bias: torch.mm(a.double(), b.double()),
        lambda a, b, bias: torch.mm(a[:0], b),
        lambda a, b, bias: torch.mm(a[:, :0], b[:0]),
    ],
)
def test_other_products_are_torchs_to_the_bit(called, every_product, call):
    tensors = factors(64, 64, 64)
    expected = call(*tensors)
    model = nn.Linear(8, 8)
    model.forward = lambda: call(*tensors)
    with accelerated(model, verbose=False, tune_operators=False, fast_dropout=False):
        assert torch.equal(model(), expected)
    assert not called


@in_runs
def test_function_is_not_taken_unless_it_was_measured_to_be_faster(called, monkeypatch):
    monkeypatch.setattr(module, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(models, "LARGE_IN_FP32", 1)
    model = Layers()
    with accelerated(model, verbose=False, tune_operators=False, fast_dropout=False):
        model(torch.randn(20, 40)).sum().backward()
    assert not called
