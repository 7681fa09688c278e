"""Lets torch trace, script and export the plain model during a run, without the wrappers around its calls.

`torch.jit.script` reads the source of a model's methods, and `torch.jit.trace` calls the model again to check the
trace. The replaced methods are restored during such a call. Functions that were imported by name before the run are not
replaced; `is_exporting` detects most of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from nano_loop.patching.attributes import replaced, suspended
from nano_loop.patching.torch_private import is_tracing

_jit: Any = torch.jit  # untyped


def is_exporting() -> bool:
    """Whether torch is recording the operators of a call in this thread to export a model."""
    if torch.compiler.is_dynamo_compiling():  # torch 2.8 can return True below even for torch.compile
        return False
    return is_tracing() or torch.compiler.is_exporting()


@contextmanager
def plain_models_exported() -> Iterator[None]:
    """Let torch's tracing, scripting and export functions see plain models until this context exits."""
    with ExitStack() as stack:
        for name in ("trace", "trace_module"):
            stack.enter_context(replaced(_jit, name, _plainly))
        stack.enter_context(replaced(cast(Any, torch.export), "export", _plainly))
        stack.enter_context(replaced(_jit, "script", _scripting_plainly))
        yield


def _plainly(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def export(*args: Any, **kwargs: Any) -> Any:
        with suspended(nn.Module):
            return original(*args, **kwargs)

    return export


def _scripting_plainly(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        # torch resolves the names in a class in the caller's frame, which is one frame further up.
        with suspended(nn.Module):
            return original(obj, optimize, _frames_up + 1, *args, **kwargs)

    return script
