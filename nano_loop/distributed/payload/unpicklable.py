"""Finds which argument cannot be pickled, and the first steps down to what in it is to blame."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FunctionType, SimpleNamespace
from typing import Any

from nano_loop.distributed.payload.faithful_pickler import FaithfulPickler

_STEPS = 3  # such as: its attribute `_modules`, its item 'encoder', its attribute `cache`
_OF_CALLABLES = ("__self__", "__defaults__", "__kwdefaults__", "func", "args", "keywords")


def find_unpicklable(named: Mapping[str, Any]) -> str | None:
    """Return a sentence on the first of the `named` objects that cannot be pickled.

    Parameters
    ----------
    named : mapping of str to Any
        What to look into, in this order, each under the words that the sentence begins with.

    Returns
    -------
    str or None
        Such as "argument `callback`, its closure variable `lock`, is a _thread.lock and cannot be pickled (...)".
    """
    for name, value in named.items():
        error = _failure(value)
        if error is not None:
            return _sentence(name, value, error)
    return None


def _failure(value: Any) -> Exception | None:
    """Return what pickling `value` alone raises."""
    try:
        FaithfulPickler(SimpleNamespace(write=len), lambda buffer: False).dump(value)
    except Exception as error:  # a user's __reduce__ may raise anything
        return error
    return None


def _sentence(name: str, value: Any, error: Exception) -> str:
    path = [name]
    for _ in range(_STEPS):
        causes = ((step, part, _failure(part)) for step, part in _parts(value))
        step, part, cause = next((cause for cause in causes if cause[2] is not None), (None, None, None))
        if step is None or cause is None:
            break
        path, value, error = [*path, step], part, cause
    comma = "," if len(path) > 1 else ""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    words = str(error).partition("\n")[0]
    return f"{', '.join(path)}{comma} is a {kind} and cannot be pickled ({type(error).__name__}: {words})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is inside `value`, each with its place in words."""
    if isinstance(value, dict):
        yield from ((f"its item {key!r}", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"its item {number}", item) for number, item in enumerate(value))
    elif isinstance(value, FunctionType):
        with suppress(ValueError):  # a variable of an outer function that is not assigned yet
            inside = inspect.getclosurevars(value)
            yield from ((f"its closure variable `{name}`", part) for name, part in inside.nonlocals.items())
            yield from ((f"its global variable `{name}`", part) for name, part in inside.globals.items())
    attributes = {name: getattr(value, name, None) for name in _OF_CALLABLES} if callable(value) else {}
    yield from ((f"its attribute `{name}`", part) for name, part in {**_state(value), **attributes}.items())


def _state(value: Any) -> dict[str, Any]:
    """Return the attributes of `value` that are pickled."""
    try:
        state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
    except Exception:  # what a user's object does here is anything
        return {}
    return state if isinstance(state, dict) else {}
