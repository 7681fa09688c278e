"""RMS norms in C are as exact as torch's and as differentiable, and leave to torch what they do not compute."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from steps.kernels.cases import compute_in_c
from torch import nn
from torch.autograd import forward_ad

from nano_loop import accelerated
from nano_loop.kernels.norm import rms_norm as module
from nano_loop.patching.operators.operators import gives_kernels

pytestmark = pytest.mark.skipif(
    module.KERNEL.unavailable is not None or not gives_kernels(), reason=f"torch 2.9: {module.KERNEL.unavailable}"
)


@pytest.fixture
def every_norm(monkeypatch):
    """Let the functions compute every norm of a run that may be in C."""
    monkeypatch.setattr(module, "MIN_ELEMENTS", 1)
    compute_in_c(monkeypatch)


def normal(*sizes, seed=0):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def computed(norm, x, weight, gradient, shape, eps):
    leaves = [leaf.detach().requires_grad_() for leaf in (x, weight) if leaf is not None]
    out = norm(leaves[0], shape, *leaves[1:], **{} if eps is None else {"eps": eps})
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def rms(tensor):
    return tensor.double().square().mean().sqrt().item()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(16, 300)),
    dimensions=st.integers(1, 2),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    offset=st.sampled_from([0.0, 3.0]),
    eps=st.sampled_from([None, 1e-5]),
    affine=st.booleans(),
    seed=st.integers(0, 99),
)
def test_norms_of_rows_are_as_exact_as_torchs(shape, dimensions, scale, offset, eps, affine, seed):
    x, gradient = (normal(*shape, seed=seed) + offset) * scale, normal(*shape, seed=seed + 1)
    rows = shape[-dimensions:]
    weight = normal(*rows, seed=seed + 2) if affine else None
    eps_of_fp32 = torch.finfo(torch.float32).eps if eps is None else eps
    wide = [None if one is None else one.double() for one in (x, weight, gradient)]
    exact = computed(F.rms_norm, *wide, rows, eps_of_fp32)
    ours, torchs = (computed(norm, x, weight, gradient, rows, eps) for norm in (module.rms_norm, F.rms_norm))
    for mine, other, truth in zip(ours, torchs, exact, strict=True):
        assert mine.shape == other.shape
        assert rms(mine - truth) <= 1.2 * rms(other - truth) + 2**-24 * max(rms(truth), 1e-3 / scale)


def test_results_do_not_depend_on_the_number_of_threads(for_each_number):
    x, weight, gradient = normal(70, 3, 100), normal(100), normal(70, 3, 100)
    results = for_each_number(lambda: computed(module.rms_norm, x, weight, gradient, [100], None), 1, 2, 3)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.affine = nn.RMSNorm(48, elementwise_affine=False), nn.RMSNorm([5, 48], eps=1e-3)

    def forward(self, x):
        return self.affine(self.plain(x).sin())


def derivatives(model, x, **options):
    """Return an output, its gradients, and those of the gradients' squares, in a run."""
    with accelerated(model, verbose=False, tune_operators=False, fast_dropout=False, **options):
        out, leaves = model(x), [x, *model.parameters()]
        gradients = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in gradients), leaves)
    return [one.detach() for one in (out, *gradients, *second)]


def test_runs_have_the_derivatives_of_plain_torch_and_exact_ones_its_bits(called, every_norm):
    model, x = Norms(), normal(8, 5, 48).requires_grad_()
    ours = derivatives(model, x)
    assert "layer_norm" in called
    with accelerated(model, verbose=False, tune_operators=False, fast_dropout=False):
        model(x).sum().backward()
    assert "layer_norm_backward" in called
    called.clear()
    exact, plain = derivatives(model, x, exact=True), derivatives(model, x, fast_norm=False)
    assert not called
    assert all(map(torch.equal, exact, plain))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in torch's forward mode
def test_batched_gradients_transforms_and_forward_mode_are_right(called, every_norm):
    model, x = Norms(), normal(8, 5, 48).requires_grad_()
    many = normal(3, 8, 5, 48)

    def of_row(row):
        return model(row).pow(3).sum()

    def found():
        out = model(x)
        batched = torch.autograd.grad(out, [x, *model.parameters()], many, is_grads_batched=True)
        mapped = torch.func.vmap(torch.func.grad(of_row))(x.detach())
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x.detach(), many[0]))).tangent
        return [*batched, mapped, tangent]

    expected = found()
    with accelerated(model, verbose=False, tune_operators=False, fast_dropout=False):
        torch.testing.assert_close(found(), expected, rtol=1e-4, atol=1e-4)
    assert called


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.rms_norm(x.mT.contiguous().mT, [64]),
        lambda x: F.rms_norm(x.double(), [64]),
        lambda x: F.rms_norm(x.bfloat16(), [64]),
        lambda x: F.rms_norm(x, [64], torch.ones(64, 2)[:, 0]),
        lambda x: F.rms_norm(x[..., :8].contiguous(), [8]),
        lambda x: F.rms_norm(x[:0], [64]),
    ],
)
def test_other_norms_are_torchs_to_the_bit(called, every_norm, call):
    x, model = normal(6, 20, 64), Norms()
    expected = call(x)
    model.forward = lambda: call(x)
    with accelerated(model, verbose=False, tune_operators=False, fast_dropout=False):
        assert torch.equal(model(), expected)
    assert not called


def test_wrong_sizes_raise_what_torch_raises(every_norm):
    model = Norms()
    model.forward = lambda: F.rms_norm(torch.ones(4, 32), [48])
    with (
        accelerated(model, verbose=False, tune_operators=False, fast_dropout=False),
        pytest.raises(RuntimeError, match="normalized_shape"),
    ):
        model()
