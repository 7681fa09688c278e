"""Checks the objects that a user hands over: loops, models, optimizers and loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from nano_loop.errors import NanoConfigError, problem


def check_loop(function: Any, name: str) -> None:
    """Raise a `NanoConfigError` where `function` is none that runs to its end when it is called."""
    kinds: dict[str, Callable[[Any], bool]] = {
        "a class": inspect.isclass,
        "a generator function": inspect.isgeneratorfunction,
        "an async function": inspect.iscoroutinefunction,
        "an async generator function": inspect.isasyncgenfunction,
        f"a {type(function).__name__}": lambda value: not callable(value),
    }
    for kind, is_of_kind in kinds.items():
        if is_of_kind(function):
            allowed = "a training loop is a plain function or method, which has trained when it returns"
            raise NanoConfigError(
                problem(f"{name} is {kind}", allowed, "Collect what it yields in a list, and return that")
            )


def check_kinds(values: list[tuple[str, type, Any]]) -> None:
    """Raise a `NanoConfigError` for the first of (argument's name, kind that it has to be, value) that is another."""
    for argument, kind, value in values:
        if not isinstance(value, kind):
            given = f"{argument} is a {type(value).__module__}.{type(value).__qualname__}"
            advice = "Call setup(model, optimizer, *dataloaders); several optimizers go into one list"
            raise NanoConfigError(problem(given, f"it has to be a {kind.__module__}.{kind.__qualname__}", advice))
