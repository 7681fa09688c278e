"""Optimizers of other libraries and a user-defined one train as in the plain loop, in every precision."""

import warnings

import pytest
import torch
from torch import nn

from nano_loop import nano

from .pairs import EXACT, Config, untouched, written_by_hand
from .tasks import Lion, fit

STEPS = 30
IN_BF16 = Config("bf16", {"precision": "bf16", "fused_optimizer": False})


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


def train(model, optimizer, loader, by_hand=untouched):
    losses = fit(model, optimizer, loader, by_hand, epochs=1)
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return losses


def trained(make, train, **options):
    torch.manual_seed(0)
    # At least 4,096 elements, below which the libraries do not quantize.
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(128, 64)
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    losses = train(model, optimizer, [(x, x[:, :4].argmax(1))] * STEPS, **options)
    return losses, [each.detach().clone() for each in model.parameters()]


@EACH
@pytest.mark.parametrize("config", [EXACT, IN_BF16], ids=lambda config: config.name)
def test_it_trains_as_in_the_plain_loop(make, config):
    plain_losses, plain = trained(make, train, by_hand=written_by_hand(config))
    losses, weights = trained(make, nano(**config.options, verbose=False)(train))
    assert losses == plain_losses
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    assert losses[-1] < 0.9 * losses[0]


@EACH
@pytest.mark.parametrize("precision", ["bf16-true", *(pytest.param(each, marks=pytest.mark.slow) for each in (64, 16))])
def test_it_trains_in_other_precisions_to_about_the_same_loss(make, precision):
    plain, _ = trained(make, train)
    losses, weights = trained(make, nano(precision=precision, verbose=False)(train))
    assert {each.dtype for each in weights} == {torch.float32}
    assert losses[0] == pytest.approx(plain[0], rel=0.01)
    assert losses[-1] == pytest.approx(plain[-1], abs=0.05 * plain[0])
