"""Optimizers of other libraries, and one of the user's own, train as in the plain loop, in every precision."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nano_loop import nano

STEPS = 30


class Sign(torch.optim.Optimizer):
    """An optimizer as a user writes it."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    average = self.state[each].setdefault("average", torch.zeros_like(each))
                    average.lerp_(each.grad, 0.1)
                    each -= group["lr"] * average.sign()


def sign(parameters):
    return Sign(parameters)


def lion(parameters):
    return pytest.importorskip("lion_pytorch").Lion(parameters, lr=1e-3)


def schedulefree_adamw(parameters):
    return pytest.importorskip("schedulefree").AdamWScheduleFree(parameters, lr=1e-2)


def schedulefree_sgd(parameters):
    return pytest.importorskip("schedulefree").SGDScheduleFree(parameters, lr=1.0)


def torchao_optimizer(name, parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its compiled kernels, which are for GPUs
        pytest.importorskip("torchao", exc_type=ImportError)
        optim = pytest.importorskip("torchao.optim", exc_type=ImportError)
    return getattr(optim, name)(parameters, lr=1e-2)


def torchao_8bit(parameters):
    return torchao_optimizer("AdamW8bit", parameters)


def torchao_4bit(parameters):
    return torchao_optimizer("AdamW4bit", parameters)


def bitsandbytes_8bit(parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    return bitsandbytes.optim.Adam8bit(parameters, lr=1e-2)


# They compile their steps by torch.compile.
OF_TORCHAO = [pytest.param(each, marks=pytest.mark.slow) for each in (torchao_8bit, torchao_4bit)]
OPTIMIZERS = [sign, lion, schedulefree_adamw, schedulefree_sgd, bitsandbytes_8bit, *OF_TORCHAO]

pytestmark = pytest.mark.filterwarnings("ignore:.*no (bf16|fp16) instructions", "ignore::DeprecationWarning:torch")


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
    # 4,096 elements and more: what is smaller, the libraries do not quantize.
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


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_it_trains_as_in_the_plain_loop(make):
    for precision, around in ((32, lambda model: model), ("bf16", by_hand)):
        plain_losses, plain = trained(make, lambda *args, around=around: fit(*args, around))
        accelerate = nano(precision=precision, fused_optimizer=False, verbose=False)
        losses, weights = trained(make, accelerate(fit))
        assert losses == plain_losses
        torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["bf16-true", pytest.param(64, marks=pytest.mark.slow), 16])
def test_it_trains_in_other_precisions_to_about_the_same_loss(make, precision):
    plain, _ = trained(make, fit)
    losses, weights = trained(make, nano(precision=precision, verbose=False)(fit))
    assert {each.dtype for each in weights} == {torch.float32}
    assert losses[0] == pytest.approx(plain[0], rel=0.01)
    assert losses[-1] == pytest.approx(plain[-1], abs=0.05 * plain[0])
