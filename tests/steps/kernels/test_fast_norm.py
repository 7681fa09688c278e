"""Norms by the kernels of `nano_loop.kernels.norm.norms`, in runs; see `test_training`, too."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import accelerated
from nano_loop.kernels import override
from nano_loop.kernels.norm import norm_arguments
from steps.kernels.cases import BY_NAME, NORMS, assert_near, images, trained, use_for_all_sizes


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_norm"])


@pytest.mark.parametrize("name", ["batch norm", "group norm", "layer norm"])
def test_gradients_can_be_differentiated(called, name):
    def penalized(**options):
        model, (x, y) = NORMS[name].built(), images()
        x.requires_grad_()
        with accelerated(model, precision="bf16", verbose=False, **options):
            loss = F.cross_entropy(model(x), y)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + 10 * gradient.square().sum()).backward()
        return [loss, gradient, *(each.grad for each in model.parameters())]

    found = penalized()
    assert name.replace(" ", "_") in called
    for mine, other in zip(found, penalized(fast_norm=False, **NORMS[name].reference), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.02, atol=2e-3)


def test_transforms_of_torch_func_compute_the_same(called):
    class PerSample(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(32)

        def forward(self, x):
            return torch.func.vmap(torch.func.grad(lambda row: self.norm(row).square().sum()))(x)

    model, x = PerSample(), torch.randn(8, 32)
    plain = model(x)
    with accelerated(model, precision="bf16", verbose=False):
        torch.testing.assert_close(model(x), plain)
    assert called


def test_evaluation_is_torch_s_for_batch_norms_and_small_norms_are(called, monkeypatch):
    model = NORMS["batch norm"].built().eval()
    with accelerated(model, precision="bf16", verbose=False):
        model(images()[0])
        monkeypatch.setattr(norm_arguments, "MIN_ELEMENTS", 1 << 18)
        model.train()(images()[0])
    assert not called


@pytest.mark.slow
def test_compiled_model_trains_as_by_torch():
    case = NORMS["batch norm"]
    found, report = trained(case, compile={"backend": "aot_eager"})
    assert {"fast_norm", "compile"} <= set(report.applied)
    assert_near(found, trained(case, fast_norm=False)[0], case.bounds)


#: Norms of 16 channels.
DIFFERENTIATED = {
    "batch": lambda: nn.BatchNorm2d(16),
    "group": lambda: nn.GroupNorm(4, 16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
    "layer": lambda: nn.LayerNorm(16),
}


def twice(norm, x):
    return norm(norm(x).sigmoid())


def penalty(norm, x):
    """Return the gradients of a gradient penalty of a norm that is called twice."""
    out = twice(norm, x)
    gradients = torch.autograd.grad(out.square().sum(), [x, *norm.parameters()], create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in gradients), [x, *norm.parameters()])


def hessian_products(norm, x):
    out = twice(norm, x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    products = torch.autograd.grad(gradient, x, torch.stack([gradient.detach(), x.detach()]), is_grads_batched=True)
    return [gradient, *products]


def batched_gradients(norm, x):
    out = twice(norm, x)
    return torch.autograd.grad(
        out, [x, *norm.parameters()], torch.stack([x.detach(), out.detach()]), is_grads_batched=True
    )


def by_functions(norm, x):
    first = torch.func.grad(lambda one: twice(norm, one).square().sum())
    return [torch.func.grad(lambda one: first(one).square().sum())(x), torch.func.vjp(first, x)[1](x.detach())[0]]


def derived(kind, derivatives, dtype, **options):
    """Return derivatives of a norm in a model of this dtype, or torch's error."""

    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = DIFFERENTIATED[kind]()

        def forward(self, x):
            return derivatives(self.norm, x)

    torch.manual_seed(0)
    model = Derived().to(dtype)
    with torch.no_grad():
        model.norm.weight.copy_(torch.rand(16) + 0.5)
    x = torch.randn(4, 16, 7, 7).to(dtype).contiguous(memory_format=torch.channels_last)
    x = (x.permute(0, 2, 3, 1) if kind == "layer" else x).requires_grad_()
    run = accelerated(model, verbose=False, tune_operators=False, **options) if options else contextlib.nullcontext()
    with run:
        try:
            return [each.detach() for each in model(x)]
        except (
            RuntimeError
        ) as error:  # there is none of a batch norm's transforms, and none for batches of a group norm
            return str(error)


@pytest.mark.parametrize("kind", DIFFERENTIATED)
@pytest.mark.parametrize("derivatives", [penalty, hessian_products, batched_gradients, by_functions])
def test_second_derivatives_of_a_norm_that_is_called_twice_are_torchs(monkeypatch, kind, derivatives):
    monkeypatch.setattr(override, "_default_in_fp32", lambda: override.COMPILED)
    mine, plain = (derived(kind, derivatives, torch.float32, **options) for options in ({"precision": 32}, {}))
    if isinstance(plain, str):
        assert mine == plain
        return
    exact = derived(kind, derivatives, torch.float64)
    for ours, torchs, truth in zip(mine, plain, exact, strict=True):
        assert (ours - truth).norm() <= 2 * (torchs - truth).norm() + 1e-5 * truth.norm()
