"""Runs in bf16 compute GELU by tanh in C, for the calls of set-up models alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import nano
from nano_loop.kernels.activation import activations
from nano_loop.patching.operators.operators import gives_kernels

pytestmark = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")


class NewGELUActivation(nn.Module):
    """As in transformers."""

    __module__ = "transformers.activations"

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class OtherGELU(NewGELUActivation):
    __module__ = "somewhere.else"


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    monkeypatch.setattr(activations, "MIN_ELEMENTS", 1)


def model_with(activation):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), activation, nn.Linear(64, 8))


def trained(model, **options):
    """Train, and return the losses and the function."""
    batches = torch.randn(6, 32, 16, generator=torch.Generator().manual_seed(1))

    def loop(model, optimizer):
        losses = []
        for x in batches:
            optimizer.zero_grad()
            loss = (model(x).float() - x[:, :8]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    train = nano(**{"verbose": False, "tune_operators": False, **options})(loop)
    return torch.tensor(train(model, torch.optim.SGD(model.parameters(), 0.3))), train


IN_ONE_PASS = ["gelu_forward", "gelu_backward"] * 6


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (nn.GELU("tanh"), IN_ONE_PASS),
        (NewGELUActivation(), IN_ONE_PASS),
        (OtherGELU(), ["tanh_forward"] * 6),
        (nn.Tanh(), ["tanh_forward"] * 6),
    ],
    ids=["GELU by tanh", "that of transformers", "another class", "tanh"],
)
def test_loop_learns_as_in_fp32(called, activation, expected):
    model = model_with(activation)
    plain, _ = trained(model_with(activation), precision=32)
    assert called == []
    losses, train = trained(model, precision="bf16")
    assert called == expected
    assert train.report["fast_activation"].status == "applied"
    torch.testing.assert_close(losses, plain, rtol=0.01, atol=0.001)


def test_gelu_in_one_pass_is_nearer_to_fp32_than_its_operators_are():
    x = torch.randn(4096).bfloat16()
    exact = NewGELUActivation()(x.double())
    in_bf16 = NewGELUActivation()(x)
    model = nn.Sequential(NewGELUActivation())
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))  # without one it is not taken for a model
    found = nano(precision="bf16-true", verbose=False, fast_activation=True)(lambda model: model(x))(model)
    errors = [(each.double() - exact).square().mean().sqrt() for each in (found, in_bf16)]
    assert errors[0] < 0.8 * errors[1]


def test_what_the_user_asked_for_or_hooks_is_called_as_it_is(called):
    trained(model_with(NewGELUActivation()), precision="bf16", fp32_ops=["tanh"])
    assert "gelu_forward" not in called
    called.clear()
    model, seen = model_with(NewGELUActivation()), []
    model[1].register_forward_hook(lambda *args: seen.append(args))
    trained(model, precision="bf16")
    assert "gelu_forward" not in called
    assert len(seen) == 6


def test_other_code_keeps_torchs_kernels(called):
    x = torch.randn(100).bfloat16()
    expected = F.gelu(x, approximate="tanh")
    found = []

    def loop(model):
        model(torch.randn(4, 16))
        found.append(F.gelu(x, approximate="tanh"))

    nano(precision="bf16", verbose=False)(loop)(model_with(nn.GELU("tanh")).requires_grad_(False))
    assert called == ["gelu_forward"]
    assert torch.equal(found[0], expected)
