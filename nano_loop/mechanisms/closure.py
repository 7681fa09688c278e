"""The closure among the arguments of an optimizer's step, as step hooks see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Closure = Callable[[], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure that a step is given, None where there is none; `args` begin with the optimizer."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) else None


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `closure` in the place of the one that is there."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
