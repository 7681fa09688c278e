"""Attention of fp32 tensors in C is as exact as torch's flash kernel, and is computed by a rule alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from steps.kernels.cases import compute_in_c
from torch import nn
from torch.autograd import forward_ad

from nano_loop import accelerated
from nano_loop.kernels.attention import fp32_attention as module
from nano_loop.patching.operators.operators import gives_kernels

pytestmark = pytest.mark.skipif(module.KERNEL.unavailable is not None, reason=str(module.KERNEL.unavailable))
in_runs = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FUNCTIONS = {"fp32_attention_forward", "fp32_attention_backward"}


def heads(rows, size, by_heads, generator, batch=2, count=3):
    """A tensor of heads, which lie one after another or, as those of a projection, row by row."""
    if by_heads:
        return torch.randn(batch, count, rows, size, generator=generator)
    return torch.randn(batch, rows, count, size + 3, generator=generator)[..., :size].transpose(1, 2)


def tensors_of(rows, keys, size, by_heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [heads(count, size, by_heads, generator) for count in (rows, keys, keys, rows)]


def mask_of(kind, rows, keys, seed=0):
    if kind is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    if kind == "padding":  # the last sequence sees no key
        lengths = torch.tensor([max(keys - 2, 1), 0])
        return torch.zeros(2, 1, 1, keys).masked_fill(torch.arange(keys) >= lengths.view(2, 1, 1, 1), -torch.inf)
    scores = torch.randn(keys, rows, generator=generator)
    return scores.t() if kind == "by columns" else scores.t().contiguous()


def rms(tensor):
    return tensor.double().square().mean().sqrt().item()


def in_c(query, key, value, of_out, mask, is_causal, scale):
    out, log_sums = module.forward(query, key, value, mask, is_causal, scale)
    return [out, *module.backward(of_out, query, key, value, mask, is_causal, scale)], log_sums


def by_softmax(query, key, value, mask, is_causal, scale):
    """Attention without the logarithm of a sum, which is lost beside a large number in fp64, too."""
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    unseen = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(unseen, 0).softmax(-1).masked_fill(unseen, 0) @ value


def assert_as_exact_as_torch(query, key, value, of_out, mask, is_causal, scale):
    ours, errors = errors_of(query, key, value, of_out, mask, is_causal, scale)
    for mine, others, size in errors:
        assert mine <= 1.2 * others + 2**-23 * max(size, rms(of_out))
    return ours


def errors_of(query, key, value, of_out, mask, is_causal, scale):
    """Return what the function computes; and its errors, torch's, and the size of what is right."""
    numbers = {"attn_mask": mask, "scale": scale}
    torchs, torchs_sums = FLASH(query, key, value, 0.0, is_causal, **numbers)
    of_torch = FLASH_BACKWARD(of_out, query, key, value, torchs, torchs_sums, 0.0, is_causal, **numbers)
    wide = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    exact = by_softmax(*wide, mask, is_causal, scale)
    of_exact = torch.autograd.grad(exact, wide, of_out.double())
    ours, log_sums = in_c(query, key, value, of_out, mask, is_causal, scale)
    torch.testing.assert_close(log_sums, torchs_sums, rtol=1e-5, atol=1e-5 * max(scale, 1))
    of_each = [*zip(ours, (torchs, *of_torch), (exact.detach(), *of_exact), strict=True)]
    assert all(mine.shape == other.shape for mine, other, _ in of_each)
    return [*ours, log_sums], [(rms(mine - truth), rms(other - truth), rms(truth)) for mine, other, truth in of_each]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 150),
    keys=st.integers(1, 150),
    size=st.integers(1, 140),
    by_heads=st.booleans(),
    mask=st.sampled_from([None, "rows", "by columns", "padding"]),
    seed=st.integers(0, 99),
)
def test_any_sizes_and_masks_are_as_exact_as_torch(mask, **sizes):
    mask = mask_of(mask, sizes["rows"], sizes["keys"])
    assert_as_exact_as_torch(*tensors_of(**sizes), mask, False, 0.2)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e9, -1e4, -torch.inf])
@pytest.mark.parametrize("sizes", [(1, 7, 8), (37, 22, 16), (130, 130, 64)], ids=str)
@pytest.mark.parametrize("rows", ["every", "some"])
def test_rows_that_are_masked_altogether_are_as_exact_as_torch(lowest, sizes, rows):
    """A logarithm of a sum beside such a number is lost in fp32."""
    mask = torch.zeros(2, 1, sizes[0], sizes[1])
    mask[:, :, :: 1 if rows == "every" else 3] = lowest
    assert_as_exact_as_torch(*tensors_of(*sizes, by_heads=False), mask, False, 0.2)


@pytest.mark.parametrize("scale", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("sizes", [(40, 30, 16), (130, 130, 64)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_saturated_scores_are_as_exact_as_torch(scale, sizes, is_causal):
    """Large scores whose rows have two close ones, as where a query meets two keys that are nearly the same.

    Over seeds, since rows in which two other keys happen to be as close have most of the error.
    """
    squares = torch.zeros(4, 2)
    for seed in range(24):
        query, key, value, of_out = tensors_of(*sizes, by_heads=True, seed=seed)
        key[:, :, 1::2] = key[:, :, : key.size(2) // 2 * 2 : 2] + 0.3 / scale * key[:, :, 1::2]
        _, errors = errors_of(query, key, value, of_out, None, is_causal, scale)
        squares += torch.tensor(errors)[:, :2].square()
    assert (squares[:, 0] <= 1.2**2 * squares[:, 1]).all(), squares.sqrt()


@pytest.mark.parametrize("sizes", [(50, 50, 40), (130, 130, 64), (200, 200, 130), (70, 33, 16), (33, 70, 16)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(for_each_number, sizes, is_causal):
    tensors = tensors_of(*sizes, by_heads=False)
    results = for_each_number(lambda: assert_as_exact_as_torch(*tensors, None, is_causal, 0.1), 1, 2, 3, 4)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_nothing_behind_the_results_and_the_memory_is_written(behind_memory):
    for sizes in ((7, 30, 65), (1, 1, 1), (60, 300, 17)):
        in_c(*tensors_of(*sizes, by_heads=True), None, True, 0.1)
    assert behind_memory
    assert all((memory == 7).all() for memory in behind_memory)


def test_what_is_no_number_stays_in_its_row(called):
    query, key, value, of_out = tensors_of(40, 40, 32, by_heads=True)
    query[1, 2, 5] = torch.nan
    (out, *_), _ = in_c(query, key, value, of_out, None, False, 0.1)
    assert out.isnan().equal(query.isnan())


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(48, 3 * 48, bias=False), nn.Linear(48, 8, bias=False)

    def forward(self, x, **options):
        query, key, value = self.query(x).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).flatten(2))


@pytest.fixture
def every_attention(monkeypatch):
    """Let the functions compute all attention of a run that may be in C."""
    monkeypatch.setattr(module, "MIN_MULTIPLICATIONS", 1)
    compute_in_c(monkeypatch)


def trained(model, x, **options):
    """Return an output and the gradients of a run, in which no product of a layer is replaced."""
    others = {"fast_dropout": False, "fast_linear": False, "tune_operators": False}
    with accelerated(model, verbose=False, **(options if "exact" in options else others | options)):
        out = model(x, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


@in_runs
def test_runs_have_the_gradients_of_plain_torch_and_exact_ones_its_bits(called, every_attention):
    torch.manual_seed(0)
    model, x = SelfAttention(), torch.randn(4, 20, 48).requires_grad_()
    ours = trained(model, x)
    assert set(called) == FUNCTIONS
    called.clear()
    exact, plain = trained(model, x, exact=True), trained(model, x, fast_attention=False)
    assert FUNCTIONS.isdisjoint(called)
    assert all(map(torch.equal, exact, plain))
    for mine, other in zip(ours, plain, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


@in_runs
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # in torch's vmap
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in torch's forward mode
def test_what_torchs_flash_kernel_does_not_compute_is_torchs(called, every_attention):
    torch.manual_seed(0)
    model, x = SelfAttention(), torch.randn(4, 20, 48)

    def found():
        with forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        mapped = torch.func.vmap(torch.func.grad(lambda row: model(row.unsqueeze(0)).square().sum()))(x)
        torch.manual_seed(1)
        return [tangent, mapped, model(x, dropout_p=0.5)]

    expected = found()
    with accelerated(model, verbose=False, tune_operators=False, fast_linear=False):
        for mine, other in zip(found(), expected, strict=True):
            assert (mine - other).norm() <= 1e-5 * other.norm()


@in_runs
def test_function_is_not_taken_unless_it_was_measured_to_be_faster(called, monkeypatch):
    monkeypatch.setattr(module, "MIN_MULTIPLICATIONS", 1)
    model = SelfAttention()
    with accelerated(model, verbose=False, tune_operators=False):
        model(torch.randn(4, 20, 48)).sum().backward()
    assert FUNCTIONS.isdisjoint(called)
