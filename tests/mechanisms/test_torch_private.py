"""Tells when a name that torch keeps for itself is gone."""

import torch
from torch import nn

from nano_loop.mechanisms.torch_private import forget_compiled, is_compiled, is_loss


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


def test_losses_are_told_from_models():
    assert is_loss(nn.CrossEntropyLoss())
    assert is_loss(nn.MSELoss())
    assert is_loss(nn.TripletMarginLoss())
    assert not is_loss(nn.ReLU())
