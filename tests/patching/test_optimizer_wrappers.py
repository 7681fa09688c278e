"""A wrapper of optimizers is unwrapped; an object that only looks like one is unchanged."""

import pytest
import torch
from loops.wrappers import Lookahead
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from nano_loop import NanoWarning
from nano_loop.patching.optimizers import innermost


def weights(count=1):
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_wrapper_given_with_its_inner_optimizer_counts_once():
    inner = SGD(weights(), lr=0.1)
    assert innermost([inner, Lookahead(inner)]) == [inner]


class Both(Optimizer):
    """One interface to several optimizers."""

    def __init__(self, *optimizers):
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], {})
        self.optimizers = list(optimizers)

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()


def test_several_inside_one_are_all_found():
    one, two = SGD(weights(), lr=0.1), AdamW(weights())
    assert innermost([Both(one, two)]) == [one, two]


def test_an_optimizer_that_steps_something_itself_is_left_whole():
    class Partly(Optimizer):
        def __init__(self, own, inner):
            super().__init__([*own, *inner.param_groups[0]["params"]], {"lr": 0.1})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    made = Partly(weights(), SGD(weights(), lr=0.1))
    assert innermost([made]) == [made]


def test_torchs_own_optimizer_is_itself_whatever_is_hung_on_it():
    made = SGD(weights(), lr=0.1)
    made.other = SGD(made.param_groups[0]["params"], lr=0.2)
    assert innermost([made]) == [made]


def test_optimizer_in_a_circle_is_found_once():
    made = Both(SGD(weights(), lr=0.1))
    made.optimizers.append(made)
    assert innermost([made]) == made.optimizers[:1]


def test_optimizer_without_hooks_is_left_out_with_a_warning():
    class Bare(Optimizer):
        def __init__(self, params):
            self.param_groups = [{"params": params}]

        def step(self, closure=None):
            pass

    with pytest.warns(NanoWarning, match=r"Bare is not accelerated.*super\(\).__init__"):
        assert innermost([Bare(weights())]) == []
