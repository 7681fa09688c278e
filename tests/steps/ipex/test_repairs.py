"""Faulty kernels of IPEX are replaced by torch's: derivatives of norms, the mean over no dimension, autocast."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from loops.pairs import has_ipex
from torch.func import grad, hessian, jvp, vmap

from nano_loop import nano

pytestmark = pytest.mark.skipif(not has_ipex(), reason="IPEX is in the environment of `make test-ipex` alone")
NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
}
SLOPES = torch.linspace(-1, 1, 40).view(5, 8)


@pytest.fixture(autouse=True)
def kernels():
    """Load IPEX's kernels and the repairs, which stay installed after a first run."""

    @nano(use_ipex=True, verbose=False)
    def run(model):
        return None

    run(torch.nn.Linear(1, 1))


@pytest.fixture(params=NORMS)
def loss(request):
    return lambda x: (NORMS[request.param](x).sin() * SLOPES).sum()


def x():
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def gradient(loss, at):
    at = at.clone().requires_grad_()
    return torch.autograd.grad(loss(at), at)[0]


def by_differences(loss, at, direction):
    """Return the derivative in a direction by finite differences in fp64."""
    at, step = at.double(), 1e-5 * direction.double()
    return ((loss(at + step) - loss(at - step)) / 2e-5).float()


def test_gradient_is_the_slope(loss):
    direction = torch.cos(x())
    slope = (gradient(loss, x()) * direction).sum()
    torch.testing.assert_close(slope, by_differences(loss, x(), direction), rtol=1e-4, atol=1e-4)
    assert slope.abs() > 0.01


def test_functional_gradient_is_that_of_backward(loss):
    torch.testing.assert_close(grad(loss)(x()), gradient(loss, x()))
    both = torch.stack([x(), x() + 1])
    torch.testing.assert_close(vmap(grad(loss))(both), torch.stack([gradient(loss, each) for each in both]))


def test_forward_mode_is_the_slope(loss):
    direction = torch.cos(x())
    torch.testing.assert_close(
        jvp(loss, (x(),), (direction,))[1], (gradient(loss, x()) * direction).sum(), rtol=1e-4, atol=1e-5
    )


def test_second_derivatives_are_the_slopes_of_the_first(loss):
    direction = torch.cos(x())
    product = (hessian(loss)(x()) * direction).sum((2, 3))
    step = 1e-3 * direction
    by_steps = (gradient(loss, x() + step) - gradient(loss, x() - step)) / 2e-3
    torch.testing.assert_close(product, by_steps, rtol=1e-2, atol=1e-2)
    assert product.abs().max() > 0.01


def test_ahead_of_time_autograd_sees_the_derivative(loss):
    compiled = torch.compile(loss, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled, x()), gradient(loss, x()))
    torch.compiler.reset()


def test_backward_warns_of_nothing(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(loss, x())


@pytest.mark.parametrize("norm", NORMS)
def test_norms_without_gradients_give_the_same(norm):
    with torch.inference_mode():
        inferred = NORMS[norm](x())
    torch.testing.assert_close(inferred.clone(), NORMS[norm](x()))


@pytest.mark.parametrize("options", [{"dim": None}, {"dim": None, "keepdim": True}, {"axis": None}, {"dim": ()}, {}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_mean_over_every_dimension_is_no_sum(options, dtype):
    values = torch.arange(12.0).view(3, 4).to(dtype)
    found = values.mean(**options)
    assert found.dtype == dtype
    assert found.shape == ((1, 1) if options.get("keepdim") else ())
    assert found.item() == 5.5


def test_mean_is_torchs_in_every_other_way():
    values = x().requires_grad_()
    torch.testing.assert_close(values.mean(1), values.sum(1) / 8)
    torch.testing.assert_close(values.mean((0, 1), keepdim=True), values.sum((0, 1), keepdim=True) / 40)
    assert values.mean(0, dtype=torch.float64).dtype == torch.float64
    torch.testing.assert_close(torch.autograd.grad(values.mean(dim=None), values)[0], torch.full((5, 8), 1 / 40))
    with pytest.raises(RuntimeError, match="could not infer output dtype"):
        torch.arange(3).mean(dim=None)


def test_group_norm_under_autocast_keeps_fp32():
    with torch.autocast("cpu", torch.bfloat16):
        assert F.group_norm(x(), 2).dtype == torch.float32
        assert F.group_norm(x().bfloat16(), 2).dtype == torch.bfloat16
