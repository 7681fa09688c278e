"""Runs in bf16 compute GELU by tanh in C, and in one pass that of transformers; see `test_training`, too."""

import pytest
import torch
from torch import nn

from nano_loop import nano
from nano_loop.steps.kernels import FastActivation
from steps.kernels.cases import ACTIVATIONS, NewGELUActivation, loop, trained, use_for_all_sizes


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    use_for_all_sizes(monkeypatch, FastActivation)


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
    trained(ACTIVATIONS["that of transformers"], fp32_ops=["tanh"])
    assert "gelu_forward_bf16" not in called
    called.clear()
    seen = []

    def hooked(model, *others):
        model[1].register_forward_hook(lambda *args: seen.append(args))
        return loop(model, *others)

    trained(ACTIVATIONS["that of transformers"], hooked)
    assert "gelu_forward_bf16" not in called
    assert len(seen) == 6
