"""Checks of the user's objects: loops, models, optimizers and loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.errors import NanoConfigError, error_message

_ITERATE = "Collect the yielded values in a list and return the list"
_AWAIT = "Write it without async, and await its inputs before the call"
_CALL = "Pass a function, or decorate the method that trains"
_BLOCK = "Decorate the function that trains it, or call that in a block of nano_loop.accelerated(model, optimizer)"
# Kinds of objects that cannot be a training loop, each with a check and the advice for its error.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "a class": (inspect.isclass, _CALL),
    "a generator function": (inspect.isgeneratorfunction, _ITERATE),
    "an async function": (inspect.iscoroutinefunction, _AWAIT),
    "an async generator function": (inspect.isasyncgenfunction, _AWAIT),
    "a model": (lambda value: isinstance(value, nn.Module), _BLOCK),
}
#: The names by which users know torch's classes.
_NAMES = {nn.Module: "torch.nn.Module", Optimizer: "torch.optim.Optimizer", DataLoader: "torch.utils.data.DataLoader"}


def check_loop(function: Any, name: str) -> None:
    """Raise a `NanoConfigError` if `function` does not run to completion when it is called."""
    allowed = "a training loop must be a plain function or method that completes the training before it returns"
    for kind, (is_of_kind, advice) in _REFUSED.items():
        if is_of_kind(function) or is_of_kind(getattr(function, "__call__", None)):  # noqa: B004
            raise NanoConfigError(error_message(f"{name} is {kind}", allowed, advice))
    if not callable(function):
        raise NanoConfigError(error_message(f"{name} is a {type(function).__name__}", allowed, _CALL))


def check_kinds(*arguments: tuple[str, type, Sequence[Any]]) -> None:
    """Raise one `NanoConfigError` that lists all values of the wrong type.

    Parameters
    ----------
    *arguments : tuple of str, type and sequence
        The name of an argument, its required type, and the values that were passed for it.
    """
    problems = []
    for name, kind, values in arguments:
        for value in values:
            if not isinstance(value, kind):
                got = f"{name} is a {type(value).__module__}.{type(value).__qualname__}".replace(" builtins.", " ")
                advice = "Pass model, optimizer, *dataloaders in this order, with several optimizers as one list"
                problems.append(error_message(got, f"it must be a {_NAMES.get(kind, kind.__qualname__)}", advice))
    if problems:
        raise NanoConfigError("\n".join(problems))
