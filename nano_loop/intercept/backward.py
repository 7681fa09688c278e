"""Defers work to the end of the outermost backward, also from within a nested backward.

An activation checkpoint (``use_reentrant=True``) recomputes a segment during a backward, and runs a nested backward of
that segment. torch's own end-of-backward callback, queued there, would run at the end of the segment. Only the caller
of the nested backward can detect the outer one, so `torch.autograd.backward` is replaced while it is needed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from nano_loop.intercept.attributes import replaced
from nano_loop.intercept.torch_private import in_backward, queue_callback


class _NestedBackwards(threading.local):
    """The functions to run at the end of this thread's outermost backward. None unless a nested backward is running."""

    waiting: list[Callable[[], None]] | None = None


_nested = _NestedBackwards()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Run `function` at the end of this thread's outermost backward, before it returns, unless the backward raises.

    Call it during a backward, inside `nested_backwards_noticed`. Outside that context, a nested backward counts as
    the outermost one.
    """
    if _nested.waiting is None:
        queue_callback(function)
    else:
        _nested.waiting.append(function)


def nested_backwards_noticed() -> AbstractContextManager[None]:
    """Return a context in which nested calls of `torch.autograd.backward` are detected."""
    return replaced(cast(Any, torch.autograd), "backward", _noticing)


def _noticing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        if _nested.waiting is not None or not in_backward():
            return original(*args, **kwargs)
        waiting: list[Callable[[], None]] = []
        _nested.waiting = waiting
        queue_callback(lambda: _run(waiting))  # the outer backward is still the current one here
        try:
            return original(*args, **kwargs)
        finally:
            _nested.waiting = None

    return backward


def _run(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
