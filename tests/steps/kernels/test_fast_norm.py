"""Norms by the kernels of `nano_loop.kernels.norm.norms`, in runs."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import accelerated, nano
from nano_loop.kernels.norm import norms
from nano_loop.patching.operators.operators import gives_kernels

pytestmark = pytest.mark.skipif(not gives_kernels(), reason="fast_norm needs torch 2.9")

CHANNELS, SIDE = 16, 12
BATCH = ("batch_norm", "batch_norm_backward")
GROUP, LAYER = ("group_norm", "group_norm_backward"), ("layer_norm", "layer_norm_backward")


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    monkeypatch.setattr(norms, "MIN_ELEMENTS", 1)


class Images(nn.Module):
    """Classifies images; the features go through a norm."""

    def __init__(self, norm):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, CHANNELS, 3, padding=1), norm
        self.head = nn.Linear(CHANNELS, 4)

    def forward(self, x):
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3)))


class Rows(Images):
    """The same with a norm of each pixel's channels."""

    def forward(self, x):
        return self.head(self.norm(self.convolution(x).permute(0, 2, 3, 1)).relu().mean((1, 2)))


class Recomputed(Images):
    """The same with an activation checkpoint."""

    def forward(self, x):
        return self.head(checkpoint(self.norm, self.convolution(x), use_reentrant=False).relu().mean((2, 3)))


MODELS = {
    "batch norm": (lambda: Images(nn.BatchNorm2d(CHANNELS)), BATCH),
    "group norm": (lambda: Images(nn.GroupNorm(4, CHANNELS)), GROUP),
    "layer norm": (lambda: Rows(nn.LayerNorm(CHANNELS)), LAYER),
    "layer norm without weights": (lambda: Rows(nn.LayerNorm(CHANNELS, elementwise_affine=False)), LAYER),
    "checkpoint": (lambda: Recomputed(nn.GroupNorm(4, CHANNELS)), ("group_norm", *GROUP)),
}


#: torch sums the gradients of a layer norm's weights in bf16, where ours are fp32's.
REFERENCE = {"layer norm": {"fp32_ops": ["layer_norm"]}}


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, SIDE, SIDE, generator=generator), torch.randint(4, (4,), generator=generator)


def trained(make, **options):
    """Return three losses, and the parameters and buffers after three steps of SGD; and the report."""
    torch.manual_seed(0)
    model, losses = make(), []

    @nano(precision="bf16", tune_operators=False, verbose=False, **options)
    def train(model, optimizer):
        x, y = data()
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()

    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [*losses, *model.state_dict().values()], train.report


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_loop_trains_as_with_torch_s_kernels(called, name, channels_last):
    make, functions = MODELS[name]
    found, report = trained(make, channels_last=channels_last)
    assert report["fast_norm"].status == "applied"
    assert called == [*functions] * 3
    called.clear()
    theirs, report = trained(make, channels_last=channels_last, fast_norm=False, **REFERENCE.get(name, {}))
    assert not called
    assert "fast_norm" not in report.applied
    for mine, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-3, atol=2e-3)


def test_code_that_was_not_set_up_keeps_torch_s_kernels(called):
    torch.manual_seed(0)
    others = [make() for make, _ in MODELS.values()]

    def losses_and_gradients():
        found = []
        for model in others:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(data()[0]), data()[1])
            loss.backward()
            found += [loss.detach(), *(each.grad for each in model.parameters())]
        return found

    plain, in_thread = losses_and_gradients(), []
    with accelerated(MODELS["batch norm"][0](), precision="bf16", verbose=False) as run:
        assert "fast_norm" in run.report.applied
        thread = threading.Thread(target=lambda: in_thread.extend(losses_and_gradients()))
        thread.start()
        thread.join()
        for found in (losses_and_gradients(), in_thread):
            assert all(map(torch.equal, found, plain))
    assert not called


@pytest.mark.parametrize("name", ["batch norm", "group norm", "layer norm"])
def test_gradients_can_be_differentiated(called, name):
    def penalized(**options):
        torch.manual_seed(0)
        model = MODELS[name][0]()
        x, y = data()
        x.requires_grad_()
        with accelerated(model, precision="bf16", verbose=False, **options):
            loss = F.cross_entropy(model(x), y)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + 10 * gradient.square().sum()).backward()
        return [loss, gradient, *(each.grad for each in model.parameters())]

    found = penalized()
    assert MODELS[name][1][0] in called
    for mine, other in zip(found, penalized(fast_norm=False, **REFERENCE.get(name, {})), strict=True):
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
    model = MODELS["batch norm"][0]().eval()
    with accelerated(model, precision="bf16", verbose=False):
        model(data()[0])
        monkeypatch.setattr(norms, "MIN_ELEMENTS", 1 << 18)
        model.train()(data()[0])
    assert not called


@pytest.mark.slow
def test_compiled_model_trains_as_by_torch():
    make = MODELS["batch norm"][0]
    found, report = trained(make, compile={"backend": "aot_eager"})
    assert {"fast_norm", "compile"} <= set(report.applied)
    for mine, other in zip(found, trained(make, fast_norm=False)[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-3, atol=2e-3)
