"""Postpones work to the end of the outermost backward, even when called inside a nested backward.

An activation checkpoint (``use_reentrant=True``) recomputes a segment in the middle of a backward and runs a nested
backward for that segment. A torch end-of-backward callback that is queued there would run at the end of the segment.
Only the caller of the inner backward can know about the outer one, so `torch.autograd.backward` is replaced as long as
callbacks are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch

from nano_loop.patching.attributes import replaced
from nano_loop.patching.ownership import call_state
from nano_loop.patching.patch_table import listening, value_in_force
from nano_loop.patching.torch_private_autograd import in_backward, queue_callback


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Run `function` when the outermost backward of this thread ends, before it returns, unless it raises.

    Call this inside a backward and within `nested_backwards_noticed`; otherwise an inner backward is mistaken for the
    outermost.
    """
    if call_state.at_end is None:
        queue_callback(function)
    else:
        call_state.at_end.append(function)


def nested_backwards_noticed() -> AbstractContextManager[None]:
    """Return a context in which a `torch.autograd.backward` nested in another one is recognized."""
    return replaced(cast(Any, torch.autograd), "backward", _noticing)


@contextmanager
def roots_weighted(
    weigh: Callable[[Any, Any], Any], note: Callable[[Any, Any], object] = lambda inputs, gradients: None
) -> Iterator[None]:
    """Let `weigh` replace the ``grad_tensors`` of each outermost `torch.autograd.backward` in any thread.

    It receives ``tensors`` and ``grad_tensors`` as the program passed them. `Tensor.backward` passes its own. `note`
    receives the ``inputs`` and the results of each outermost `torch.autograd.grad`.
    """
    with ExitStack() as stack:
        stack.enter_context(nested_backwards_noticed())
        stack.enter_context(replaced(cast(Any, torch.autograd), "grad", _noting))
        stack.enter_context(listening(roots_weighted, (weigh, note)))
        yield


@contextmanager
def backwards_watched(watcher: Callable[[], None]) -> Iterator[None]:
    """Call `watcher`, or that of a nested context, after each outermost `torch.autograd.backward`."""
    with nested_backwards_noticed(), listening(backwards_watched, watcher):
        yield


def _noticing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if not in_backward():
            for weigh, _ in value_in_force(roots_weighted) or ():
                grad_tensors = weigh(tensors, grad_tensors)
        noticed(tensors, grad_tensors, *args, **kwargs)
        if not in_backward():
            for watcher in (value_in_force(backwards_watched) or ())[-1:]:
                watcher()

    def noticed(*args: Any, **kwargs: Any) -> None:
        if call_state.at_end is not None or not in_backward():
            return original(*args, **kwargs)
        waiting: list[Callable[[], None]] = []
        call_state.at_end = waiting
        queue_callback(lambda: _run(waiting))  # the outer backward is still the current one here
        try:
            return original(*args, **kwargs)
        finally:
            call_state.at_end = None

    return backward


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        results = original(outputs, inputs, *args, **kwargs)
        if not in_backward():
            for _, note in value_in_force(roots_weighted) or ():
                note(inputs, results)
        return results

    return grad


def _run(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
