"""Norms by the kernels of `nano_loop.kernels.norm.norms`, in runs; see `test_training`, too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import accelerated
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
