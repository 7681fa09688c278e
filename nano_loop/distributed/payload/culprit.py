"""Finds which part of an object cannot be pickled, and says the way down to it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from nano_loop.distributed.payload.faithful_pickler import FaithfulPickler

_DEEPEST = 40  # steps down; each layer of a model takes two


def find_culprit(named: Mapping[str, Any]) -> str | None:
    """Say which of the `named` objects cannot be pickled, because of what inside it, and why.

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
            return _sentence(*_deepest(value, error, [name]))
    return None


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> None:
        pass


def _dry_pickler() -> FaithfulPickler:
    return FaithfulPickler(_Nowhere(), lambda buffer: False)


def _failure(value: Any) -> Exception | None:
    """Return what pickling `value` alone raises."""
    try:
        _dry_pickler().dump(value)
    except Exception as error:  # a user's __reduce__ may raise anything
        return error
    return None


def _deepest(value: Any, error: Exception, way: list[str]) -> tuple[list[str], Any, Exception]:
    seen = {id(value)}
    while len(way) < _DEEPEST and not _too_deep(error):
        for step, part in _parts(value):
            cause = None if id(part) in seen else _failure(part)
            if cause is not None:
                value, error = part, cause
                way = [*way, step]
                seen.add(id(part))
                break
        else:
            break
    return way, value, error


def _too_deep(error: Exception) -> bool:
    """Whether it is the nesting that fails, which no part of it is to blame for."""
    return isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)


def _sentence(way: list[str], value: Any, error: Exception) -> str:
    kind = type(value)
    shown = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    comma = "," if len(way) > 1 else ""
    words = (str(error).splitlines() or [""])[0]
    return f"{', '.join(way)}{comma} is a {shown} and cannot be pickled ({type(error).__name__}: {words})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a pickler would go into, each with its place in words."""
    if isinstance(value, dict):
        yield from (("one of its keys", key) for key in value)
        yield from ((f"its item {_key(key)}", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"its item {number}", item) for number, item in enumerate(value))
    if isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, MethodType):
        yield from (("its object", value.__self__), ("its function", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("its function", value.func), ("its arguments", value.args), ("its keywords", value.keywords))
    elif isinstance(value, type):
        yield from ((f"its attribute `{name}`", part) for name, part in vars(value).items() if name != "__dict__")
    else:
        yield from _parts_of_state(value)


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, str | int) else f"of a {type(key).__name__}"


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"its closure variable `{name}`", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in function.__globals__:
            yield f"its global variable `{name}`", function.__globals__[name]
    yield "its defaults", function.__defaults__
    yield "its defaults", function.__kwdefaults__
    yield from ((f"its attribute `{name}`", part) for name, part in vars(function).items())


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _parts_of_state(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        arguments, state = (*_dry_pickler().reduced(value), None)[1:3]
    except Exception:  # then it is the object itself that cannot be pickled
        return
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from ((f"its attribute `{name}`", attribute) for name, attribute in part.items())
        else:
            yield "its state", part
    yield from ((f"part {number} of it", part) for number, part in enumerate(arguments))
