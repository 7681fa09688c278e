"""Computations in calls into a set-up model and in their backwards are attributed to the model."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop.patching import ownership
from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.patching.ownership import Rules, rules_now


class Asking(torch.autograd.Function):
    """Records in its forward and in its backward whether it belongs to a set-up model."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        notes.append(rules_now() is not None)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.notes.append(rules_now() is not None)
        return gradient * 2, None


class Model(nn.Module):
    """Calls `Asking`, once or with its inner part recomputed in the backward."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.reentrant = reentrant
        self.notes = []

    def part(self, x):
        return Asking.apply(self.inner(x), self.notes).tanh()

    def forward(self, x):
        return self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.fixture
def interceptors():
    made = CallInterceptors()
    yield made
    made.close()


def ones():
    return torch.ones(1, 2, requires_grad=True)


@pytest.mark.parametrize(("reentrant", "calls"), [(None, 2), (False, 3), (True, 3)])  # forward, recompute, backward
def test_forwards_recomputations_and_backwards_of_a_set_up_model_belong_and_no_others(interceptors, reentrant, calls):
    model, other = Model(reentrant), Model(reentrant)
    interceptors.for_model(model)
    (model(ones()).sum() + other(ones()).sum()).backward()
    forwards = 2 if reentrant else None  # its backward is one within another
    assert model.notes[:forwards] == [True] * (forwards or calls)
    assert other.notes == [False] * calls


def test_graphs_of_calls_in_between_are_told_apart(interceptors):
    model, other = Model(), Model()
    interceptors.for_model(model)
    outputs = [each(ones()) for _ in range(5) for each in (model, other)]
    torch.cat(outputs).sum().backward()
    assert model.notes == [True] * 10
    assert other.notes == [False] * 10


def test_another_threads_graphs_with_the_same_numbers_do_not_belong(interceptors):
    model, other = Model(), Model()
    interceptors.for_model(model)

    def train():
        for _ in range(20):
            other(ones()).sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(20):
        model(ones()).sum().backward()
    thread.join()
    assert model.notes == [True] * 40
    assert other.notes == [False] * 40


def test_graph_does_not_belong_once_no_model_is_set_up():
    interceptors, model = CallInterceptors(), Model()
    interceptors.for_model(model)
    out = model(ones())
    interceptors.close()
    out.sum().backward()
    assert model.notes == [True, False]


def test_calls_long_ago_are_forgotten_and_those_since_are_not(interceptors, monkeypatch):
    monkeypatch.setattr(ownership, "_MOST_CALLS", 4)
    model = Model()
    interceptors.for_model(model)
    outputs = [model(ones()) * 2 for _ in range(6)]
    model.notes.clear()
    outputs[-1].sum().backward()
    outputs[0].sum().backward()
    assert model.notes == [True, False]


def test_the_first_node_behind_a_call_is_not_of_the_call():
    try:
        rules = Rules(takes_kernels=True)
        ownership.note_graph(1000, 1003, rules)
        found = [ownership.rules_of_node(number) for number in (999, 1000, 1002, 1003)]
        assert found == [None, rules, rules, None]
    finally:
        ownership.forget_graphs()
