"""The uses of private names of `torch.compile` and tracing; see `nano_loop.patching.torch_private`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from nano_loop.patching.torch_private import full_name

#: Whether `torch.compile` traces ``function.__get__`` but not `types.MethodType`. 2.8 and 2.11 do the opposite.
TRACES_BINDING = torch.__version__ >= "2.13"  # a `TorchVersion`, which compares version numbers
#: The package of `torch.compile`. Every optimizer imports it, which takes as long as importing torch.
COMPILER_PACKAGE = "torch._dynamo"
_COMPILER = "torch._dynamo.eval_frame"
_ORIGINAL_FUNCTION = "_torchdynamo_orig_callable"


def is_compiled(model: nn.Module) -> bool:
    """Whether a model was compiled by `torch.compile` or `model.compile()`. torch has no public check."""
    # Importing it takes as long as importing torch, and nothing was compiled if it is not imported.
    compiled: Any = getattr(sys.modules.get(COMPILER_PACKAGE), "OptimizedModule", ())
    return isinstance(model, compiled) or model._compiled_call_impl is not None


def constant_when_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `torch.compile` call the function once, during tracing, and treat the result as a constant.

    The public `torch.compiler.assume_constant_result` does the same, but imports torch._dynamo, which takes as long as
    importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: Callable[..., Any]) -> None:
    """Prevent `torch.compile` from tracing a Python function that C++ code calls, and everything that it calls.

    The public `torch.compiler.disable` imports torch._dynamo and adds a wrapper around each call.
    """
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is not None:
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
        dynamo.set_code_exec_strategy(code, skip)


@contextmanager
def outside_graphs(function: Callable[..., Any]) -> Iterator[None]:
    """Make a replacement of a torch function break graphs in the body; otherwise Dynamo traces the original."""
    from torch._dynamo import trace_rules

    trace_rules._disallowed_callable_ids.add(id(function))
    try:
        yield
    finally:
        trace_rules._disallowed_callable_ids.remove(id(function))


def forget_compiled(model: nn.Module) -> None:
    """Undo `model.compile()` and `call_compiled`. torch has no public function for it."""
    vars(model).pop("_compiled_call_impl", None)


def plain_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks but not its compiled call."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_compiled(module: nn.Module, function: Callable[..., Any]) -> None:
    """Make calls of a module call ``function(module, ...)``.

    The public ``module.compile()`` creates one function per module, all of which count towards the same recompile
    limit.
    """
    module._compiled_call_impl = functools.partial(function, module)


def mode_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """Return the options of a mode of `torch.compile`, which accepts either a mode or options."""
    from torch._inductor import list_mode_options  # as in torch.compile's documentation

    return {} if mode in (None, "default") else dict(list_mode_options(mode, dynamic))


def forget_dispatch(operators: Collection[str], dispatch_key: str) -> None:
    """Make torch's Python dispatcher, which `torch.compile` traces through, look up kernels of ATen operators again.

    It caches where a dispatch key leads for each operator, and torch only clears this for kernels in Python's own
    tables. Tracing after a run would otherwise call a kernel of the run, which no longer exists.
    """
    names = {*map(full_name, operators)}
    key = getattr(torch._C.DispatchKey, dispatch_key)
    for overload in tuple(torch._ops.get_cached_ops()):  # type: ignore[no-untyped-call]
        if overload.name() in names:
            overload._uncache_dispatch(key)


def compiled_call(module: nn.Module) -> Any:
    """Return the compiled call that `module.compile()` has set, or None."""
    return vars(module).get("_compiled_call_impl")


def compile_call(module: nn.Module, context: Callable[[Any], Any]) -> None:
    """Compile a module in place with the context of another compiled module; see `compile_context`."""
    module._compiled_call_impl = context(module._call_impl)


def compile_context(compiled: Any) -> Any:
    """Return the picklable context by which `torch.compile` wrapped a function, or None for other functions."""
    # Check where the function was defined, because functools.wraps copies torch's markers to other functions.
    made_by_torch = isinstance(compiled, FunctionType) and compiled.__globals__.get("__name__") == _COMPILER
    if not made_by_torch or _ORIGINAL_FUNCTION not in vars(compiled):
        return None
    return inspect.getclosurevars(compiled).nonlocals.get("self")


def uncompiled(function: FunctionType) -> Any:
    """Return the original of a compiled function that has a `compile_context`."""
    return vars(function)[_ORIGINAL_FUNCTION]
