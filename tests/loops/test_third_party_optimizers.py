"""Optimizers of other libraries and a user-defined one train as in the plain loop, in every precision."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nano_loop import nano

from .tasks import Lion

STEPS = 30


def library(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels for GPUs
        return pytest.importorskip(name, exc_type=ImportError)


OPTIMIZERS = {
    "one of the user's": Lion,
    "lion": lambda parameters: library("lion_pytorch").Lion(parameters, lr=1e-3),
    "schedulefree AdamW": lambda parameters: library("schedulefree").AdamWScheduleFree(parameters, lr=1e-2),
    "schedulefree SGD": lambda parameters: library("schedulefree").SGDScheduleFree(parameters, lr=1.0),
    "bitsandbytes": lambda parameters: library("bitsandbytes").optim.Adam8bit(parameters, lr=1e-2),
    "torchao 8 bit": lambda parameters: library("torchao.optim").AdamW8bit(parameters, lr=1e-2),
    "torchao 4 bit": lambda parameters: library("torchao.optim").AdamW4bit(parameters, lr=1e-2),
}
SLOW = ("torchao 8 bit", "torchao 4 bit")  # they compile their steps with torch.compile
EACH = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, make in OPTIMIZERS.items()],
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def fit(model, optimizer, x, y, around=lambda call: call):
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(around(model)(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return losses


def trained(make, train):
    torch.manual_seed(0)
    # At least 4,096 elements, below which the libraries do not quantize.
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(128, 64)
    y = x[:, :4].argmax(1)
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    return train(model, optimizer, x, y), [each.detach().clone() for each in model.parameters()]


def by_hand(model):
    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    return call


@EACH
def test_it_trains_as_in_the_plain_loop(make):
    in_bf16 = {"precision": "bf16", "fused_optimizer": False}
    for options, around in (({"exact": True}, lambda model: model), (in_bf16, by_hand)):
        plain_losses, plain = trained(make, lambda *args, around=around: fit(*args, around))
        accelerate = nano(**options, verbose=False)
        losses, weights = trained(make, accelerate(fit))
        assert losses == plain_losses
        torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    assert losses[-1] < 0.9 * losses[0]


@EACH
@pytest.mark.parametrize("precision", ["bf16-true", *(pytest.param(each, marks=pytest.mark.slow) for each in (64, 16))])
def test_it_trains_in_other_precisions_to_about_the_same_loss(make, precision):
    plain, _ = trained(make, fit)
    losses, weights = trained(make, nano(precision=precision, verbose=False)(fit))
    assert {each.dtype for each in weights} == {torch.float32}
    assert losses[0] == pytest.approx(plain[0], rel=0.01)
    assert losses[-1] == pytest.approx(plain[-1], abs=0.05 * plain[0])
