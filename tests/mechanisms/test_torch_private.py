"""Tells when a name that torch keeps for itself is gone."""

import pytest
import torch
from torch import nn

from nano_loop.mechanisms.torch_private import (
    forget_compiled,
    forget_fused_check,
    fused_check_pending,
    is_compiled,
    is_loss,
)


def test_compiled_models_are_told_from_others():
    model = nn.Linear(2, 2)
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    assert is_compiled(model)


def test_compiling_can_be_taken_back():
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    model.compile(backend="eager")
    forget_compiled(model)
    assert not is_compiled(model)
    assert vars(model).keys() - before.keys() <= {"_compiled_call_impl"}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_first_fused_step_leaves_a_mark_that_can_be_removed(kind):
    weight = nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1)
    before = set(vars(optimizer))
    assert fused_check_pending(optimizer)
    optimizer.param_groups[0]["fused"] = True
    weight.sum().backward()
    optimizer.step()
    assert not fused_check_pending(optimizer)
    forget_fused_check(optimizer)
    assert set(vars(optimizer)) == before


def test_losses_are_told_from_models():
    assert is_loss(nn.CrossEntropyLoss())
    assert is_loss(nn.MSELoss())
    assert is_loss(nn.TripletMarginLoss())
    assert not is_loss(nn.ReLU())
