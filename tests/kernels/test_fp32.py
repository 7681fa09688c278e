"""Functions in C for fp32 tensors are as near to fp64 as torch's kernels, over 25 seeds, and are taken by a rule."""

import copy

import pytest
import torch
import torch.nn.functional as F
from steps.kernels.cases import compute_in_c
from torch import nn

from nano_loop import accelerated
from nano_loop.kernels import override
from nano_loop.kernels.linear import fp32_product
from nano_loop.kernels.loss import cross_entropy
from nano_loop.kernels.norm import norm_arguments, rms_norm
from nano_loop.patching.operators.operators import gives_kernels
from nano_loop.steps.kernels import models

CHOOSE = override.Override._is_chosen
SEEDS, WORDS = 25, 1000
IMAGES, ROWS = (8, 32, 12, 12), (64, 5, 48)


class Loss(nn.Module):
    """The cross-entropy of words; its weight is that of a model with many outputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WORDS, 1))

    def forward(self, logits):
        return F.cross_entropy(logits * self.weight.t(), torch.arange(len(logits)), reduction="none")


class InNhwc(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.contiguous(memory_format=torch.channels_last))


MODELS = {
    "layer norm": (lambda: nn.LayerNorm(48), ROWS),
    "RMS norm": (lambda: nn.RMSNorm(48), ROWS),
    "linear": (lambda: nn.Linear(48, 40), ROWS),
    "linear of many inputs": (lambda: nn.Linear(600, 70), (40, 600)),
    "batch norm": (lambda: nn.BatchNorm2d(32), IMAGES),
    "batch norm in NHWC": (lambda: InNhwc(nn.BatchNorm2d(32)), IMAGES),
    "group norm in NHWC": (lambda: InNhwc(nn.GroupNorm(4, 32)), IMAGES),
    "cross-entropy": (Loss, (40, WORDS)),
}


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    monkeypatch.setattr(norm_arguments, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(cross_entropy, "MIN_LOGITS", 1)
    monkeypatch.setattr(rms_norm, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(fp32_product, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(models, "LARGE_IN_FP32", 1)
    compute_in_c(monkeypatch)


def computed(model, x, gradient):
    """Return the output, and the gradients of the input and of the parameters, in fp64."""
    x = x.detach().requires_grad_()
    out = model(x)
    gradients = torch.autograd.grad(out, [x, *model.parameters()], gradient.to(out.dtype))
    return [each.detach().double() for each in (out, *gradients)]


def squares(found, exact):
    """Return the square of each tensor's error, relative to the norm."""
    return sum(((one - other).norm() / other.norm()).item() ** 2 for one, other in zip(found, exact, strict=True))


@pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
@pytest.mark.parametrize("name", MODELS)
def test_errors_over_seeds_are_at_most_torchs(called, name):
    make, shape = MODELS[name]
    errors = {"torch": 0.0, "ours": 0.0}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model, x = make(), 2 * torch.randn(shape)
        gradient = torch.randn_like(model(x))
        exact = computed(copy.deepcopy(model).double(), x.double(), gradient)
        errors["torch"] += squares(computed(model, x, gradient), exact)
        with accelerated(model, tune_operators=False, verbose=False):
            errors["ours"] += squares(computed(model, x, gradient), exact)
    assert len(called) >= SEEDS
    assert errors["ours"] <= errors["torch"]


@pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
@pytest.mark.parametrize(
    ("guess", "options", "is_compiled"),
    [
        (override.COMPILED, {}, True),
        (override.TORCH, {}, False),
        (override.COMPILED, {"exact": True}, False),
        (override.TORCH, {"precision": "bf16"}, True),
    ],
)
def test_first_guess_decides_but_not_in_exact_runs_nor_in_bf16(called, monkeypatch, guess, options, is_compiled):
    monkeypatch.setattr(override.Override, "_is_chosen", CHOOSE)
    monkeypatch.setattr(override, "_default_in_fp32", lambda: guess)
    model = nn.LayerNorm(48)
    with accelerated(model, tune_operators=False, verbose=False, **options):
        model(torch.randn(ROWS))
    assert ("layer_norm" in called) == is_compiled
