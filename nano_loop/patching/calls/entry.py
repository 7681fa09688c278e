"""Replacements of module methods during a run.

cloudpickle and dill pickle `model.score` with this function and its globals, so the globals here must be picklable:
`call_state` is unpickled without interceptors, even if nano_loop is not installed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from nano_loop.patching.ownership import call_state

_CALL = torch.nn.Module.__call__.__name__


def through_interceptor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of `original`."""
    is_module_call = original.__name__ == _CALL

    @functools.wraps(original)
    def call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if call_state.in_call:  # like `calls._innermost`, but saves a function call per module
            inner = None if torch.compiler.is_dynamo_compiling() else call_state.modules.get(id(self))
            return original(self, *args, **kwargs) if inner is None else inner(original, self, *args, **kwargs)
        interceptors = call_state.interceptors.get(id(self))
        if interceptors is not None:
            return interceptors[0].enter(original, self, *args, **kwargs)
        if not is_module_call or torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        if call_state.watched or not call_state.watchers:
            return original(self, *args, **kwargs)
        return call_state.watchers[-1](original, self, *args, **kwargs)

    with suppress(TypeError, ValueError):  # the signature may be unavailable
        call.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # `getfullargspec` reads no other
    return call
