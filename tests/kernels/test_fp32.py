"""C functions for fp32 are as close to fp64 as torch's kernels, over 25 seeds, and other calls are left to torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from steps.kernels.cases import BY_NAME, use_for_all_sizes
from torch import nn

from kernels.compared.attention import IN_FP32, by_softmax, fp32_call, has_torchs_log_sums
from kernels.compared.oracle import rms
from kernels.compared.products import factors
from kernels.conftest import compute_every_size
from nano_loop import accelerated
from nano_loop.patching.operators import gives_kernels
from nano_loop.steps import models

in_runs = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
SEEDS, WORDS = 25, 1000
IMAGES, ROWS = (8, 32, 12, 12), (64, 5, 48)


class Loss(nn.Module):
    """The cross-entropy of words; its weight belongs to a model with many outputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WORDS, 1))

    def forward(self, logits):
        return F.cross_entropy(logits * self.weight.t(), torch.arange(len(logits)), reduction="none")


MODELS = {
    "layer norm": (lambda: nn.LayerNorm(48), ROWS),
    "RMS norm": (lambda: nn.RMSNorm(48), ROWS),
    "linear": (lambda: nn.Linear(48, 40), ROWS),
    "linear of many inputs": (lambda: nn.Linear(600, 70), (40, 600)),
    "batch norm": (lambda: nn.BatchNorm2d(32), IMAGES),
    "batch norm in NHWC": (lambda: nn.BatchNorm2d(32), IMAGES),
    "group norm in NHWC": (lambda: nn.GroupNorm(4, 32), IMAGES),
    "cross-entropy": (Loss, (40, WORDS)),
}


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    monkeypatch.setattr(models, "LARGE_IN_FP32", 1)
    compute_every_size(monkeypatch)


def computed(model, x, gradient):
    """Return the output, and the gradients of the input and of the parameters, in fp64."""
    x = x.detach().requires_grad_()
    out = model(x)
    gradients = torch.autograd.grad(out, [x, *model.parameters()], gradient.to(out.dtype))
    return [each.detach().double() for each in (out, *gradients)]


def squares(found, exact):
    return sum(((one - other).norm() / other.norm()).item() ** 2 for one, other in zip(found, exact, strict=True))


@in_runs
@pytest.mark.parametrize("name", MODELS)
def test_errors_over_seeds_are_at_most_torchs(called, name):
    make, shape = MODELS[name]
    errors = {"torch": 0.0, "ours": 0.0}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model, x = make(), 2 * torch.randn(shape)
        x = x.contiguous(memory_format=torch.channels_last) if name.endswith("NHWC") else x
        gradient = torch.randn_like(model(x))
        exact = computed(copy.deepcopy(model).double(), x.double(), gradient)
        errors["torch"] += squares(computed(model, x, gradient), exact)
        with accelerated(model, tune_operators=False, verbose=False):
            errors["ours"] += squares(computed(model, x, gradient), exact)
    assert len(called) >= SEEDS
    assert errors["ours"] <= errors["torch"]


@pytest.mark.skipif(IN_FP32.kernel.unavailable is not None, reason=str(IN_FP32.kernel.unavailable))
@pytest.mark.parametrize("scale", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("sizes", [(40, 30, 16), pytest.param((130, 130, 64), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_saturated_scores_are_as_exact_as_torch(scale, sizes, is_causal):
    """Large scores whose rows have two close ones, as for a query with two keys that are nearly equal.

    Over several seeds, because rows in which two other keys happen to be as close dominate the error.
    """
    squares = torch.zeros(4, 2)
    for seed in range(24):
        call = fp32_call(*sizes, is_causal=is_causal, scale=scale, seed=seed)
        key = call[1]
        key[:, :, 1::2] = key[:, :, : key.size(2) // 2 * 2 : 2] + 0.3 / scale * key[:, :, 1::2]
        ours, torchs = IN_FP32.ours(call), IN_FP32.torchs(call)
        has_torchs_log_sums(call, ours, torchs)
        errors = [
            [rms(one - truth) for one in (mine, other)]
            for mine, other, truth in zip(ours, torchs, by_softmax(call), strict=False)
        ]
        squares += torch.tensor(errors).square()
    assert (squares[:, 0] <= 1.2**2 * squares[:, 1]).all(), squares.sqrt()


# --- calls left to torch ---


def run_of(model, **options):
    """Run a model, in which only products, norms and attention may be replaced."""
    return accelerated(model, verbose=False, tune_operators=False, fast_dropout=False, **options)


def normed(call):
    """Return a call of RMS norms that ignores the arguments for products."""
    return lambda a, b, bias: call(torch.randn(6, 20, 64, generator=torch.Generator().manual_seed(0)))


PRODUCTS = {
    "beta": lambda a, b, bias: torch.addmm(bias, a, b, beta=2),
    "alpha": lambda a, b, bias: torch.addmm(bias, a, b, alpha=0.5),
    "matrix added": lambda a, b, bias: torch.addmm(a, a, b),
    "rows added": lambda a, b, bias: torch.addmm(bias.expand(64, 64).clone(), a, b),
    "number added": lambda a, b, bias: torch.addmm(bias[:1], a, b),
    "out": lambda a, b, bias: torch.mm(a, b, out=torch.empty(64, 64, dtype=a.dtype).t()),
    "into a factor": lambda a, b, bias: torch.addmm(a[0], b, b, out=a),  # torch copies the bias first
    "fp64": lambda a, b, bias: torch.mm(a.double(), b.double()),
    "no rows": lambda a, b, bias: torch.mm(a[:0], b),
    "no depth": lambda a, b, bias: torch.mm(a[:, :0], b[:0]),
}
#: The kernel for fp32 takes these.
PRODUCTS_IN_BF16 = PRODUCTS | {
    "every second column": lambda a, b, bias: torch.mm(a[:, ::2], b[::2]),
    "one row for all": lambda a, b, bias: torch.mm(a[:1].expand(64, 64), b),
}
NORMS = {
    "norm of columns": normed(lambda x: F.rms_norm(x.mT.contiguous().mT, [64])),
    "norm in fp64": normed(lambda x: F.rms_norm(x.double(), [64])),
    "norm in fp16": normed(lambda x: F.rms_norm(x.half(), [64])),
    "norm with a weight in bf16": normed(lambda x: F.rms_norm(x, [64], torch.ones(64).bfloat16())),
    "norm with gaps in its weight": normed(lambda x: F.rms_norm(x, [64], torch.ones(64, 2)[:, 0])),
    "small norm": normed(lambda x: F.rms_norm(x[..., :8].contiguous(), [8])),
    "norm of nothing": normed(lambda x: F.rms_norm(x[:0], [64])),
}


def calling(function, name):
    """Return a model with a layer of the named kind, whose forward is a function."""
    model = nn.RMSNorm(48) if "norm" in name else nn.Linear(48, 40)
    model.forward = function
    return model


def assert_torchs(called, call, name, tensors, **options):
    expected, model = call(*(each.clone() for each in tensors)), calling(lambda: call(*tensors), name)
    with run_of(model, **options):
        assert torch.equal(model(), expected)
    assert not called


@in_runs
@pytest.mark.parametrize("name", PRODUCTS | NORMS)
def test_other_calls_are_torchs_to_the_bit(called, name):
    assert_torchs(called, (PRODUCTS | NORMS)[name], name, factors(64, 64, 64))


@in_runs
@pytest.mark.parametrize("name", PRODUCTS_IN_BF16)
def test_other_products_in_bf16_are_torchs_to_the_bit(called, monkeypatch, name):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_linear"])

    def call(*tensors):
        with torch.autocast("cpu", enabled=False):
            return PRODUCTS_IN_BF16[name](*tensors)

    tensors = factors(64, 64, 64, dtype=torch.bfloat16)
    assert_torchs(called, call, name, tensors, precision="bf16", fast_linear=True)


@in_runs
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: F.rms_norm(torch.ones(4, 32), [48]), "normalized_shape"),
        (lambda: F.layer_norm(torch.ones(600, 512), (512,), torch.ones(1)), "weight"),
        (lambda: F.layer_norm(torch.ones(600, 512), (512,), torch.ones(500)), "weight"),
    ],
)
def test_wrong_sizes_raise_what_torch_raises(call, words):
    model = calling(call, "norm")
    with run_of(model), pytest.raises(RuntimeError, match=words):
        model()
