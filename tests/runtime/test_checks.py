"""Objects that are not a training loop, model, optimizer or loader raise an error with their kind and a remedy."""

import functools

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop import NanoConfigError
from nano_loop.runtime.objects.training_objects import check_kinds, check_loop


def generate():
    yield


async def wait():
    """Do nothing, asynchronously."""


async def generate_later():
    yield


class Train:
    def __call__(self):
        return 1

    def method(self):
        return 2


class Generates:
    def __call__(self):
        yield


class Waits:
    async def __call__(self):
        return None


LOOPS = {
    "a lambda": lambda: 1,
    "an object": Train(),
    "a method": Train().method,
    "a partial": functools.partial(lambda x: x, 1),
    "a builtin": print,
}
NO_LOOPS = {
    "a class": Train,
    "a generator function": generate,
    "an async function": wait,
    "an async generator function": generate_later,
    "a str": "train",
    "a NoneType": None,
    "a classmethod": classmethod(generate),
    "a model": torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("function", LOOPS.values(), ids=LOOPS)
def test_what_runs_to_its_end_when_called_is_a_loop(function):
    check_loop(function, "train")


WRAPPED = [*map(functools.partial, (generate, wait, generate_later)), Generates(), Waits()]


@pytest.mark.parametrize("function", WRAPPED)
def test_partial_and_object_whose_call_has_not_trained_when_it_returns_is_told(function):
    with pytest.raises(NanoConfigError, match=r"generator|async"):
        check_loop(function, "train")


@pytest.mark.parametrize("kind", ["a class", "an async function", "a str"])
def test_advice_is_about_yields_only_where_something_yields(kind):
    with pytest.raises(NanoConfigError) as caught:
        check_loop(NO_LOOPS[kind], "train")
    assert "yield" not in str(caught.value)


def test_all_wrong_kinds_are_told_at_once():
    with pytest.raises(NanoConfigError, match=r"(?s)model.*\noptimizer.*\ndataloaders"):
        check_kinds(("model", nn.Module, ["net"]), ("optimizer", Optimizer, [3]), ("dataloaders", DataLoader, [[]]))
