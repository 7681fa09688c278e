"""Checks the objects that a user hands over: loops, models, optimizers and loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from nano_loop.errors import NanoConfigError, problem

_ITERATE = "Collect what it yields in a list, and return that"
_AWAIT = "Write it without async; await what it needs before you call it"
_CALL = "Pass a function, or decorate the method that trains"
# What is no training loop, and what to do about it.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "a class": (inspect.isclass, _CALL),
    "a generator function": (inspect.isgeneratorfunction, _ITERATE),
    "an async function": (inspect.iscoroutinefunction, _AWAIT),
    "an async generator function": (inspect.isasyncgenfunction, _AWAIT),
}


def check_loop(function: Any, name: str) -> None:
    """Raise a `NanoConfigError` where `function` is none that runs to its end when it is called."""
    allowed = "a training loop is a plain function or method, which has trained when it returns"
    for kind, (is_of_kind, advice) in _REFUSED.items():
        if is_of_kind(function) or is_of_kind(getattr(function, "__call__", None)):  # noqa: B004
            raise NanoConfigError(problem(f"{name} is {kind}", allowed, advice))
    if not callable(function):
        raise NanoConfigError(problem(f"{name} is a {type(function).__name__}", allowed, _CALL))


def check_kinds(*arguments: tuple[str, type, Sequence[Any]]) -> None:
    """Raise one `NanoConfigError` for all values that are of another kind than they have to be.

    Parameters
    ----------
    *arguments : tuple of str, type and sequence
        An argument's name, its kind, and the values that were given for it.
    """
    problems = []
    for name, kind, values in arguments:
        for value in values:
            if not isinstance(value, kind):
                given = f"{name} is a {type(value).__module__}.{type(value).__qualname__}"
                advice = "Call setup(model, optimizer, *dataloaders); several optimizers go into one list"
                problems.append(problem(given, f"it has to be a {kind.__module__}.{kind.__qualname__}", advice))
    if problems:
        raise NanoConfigError("\n".join(problems))
