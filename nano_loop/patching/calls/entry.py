"""Replacements of module methods during a run, except while torch traces, scripts or exports the plain model.

`torch.jit.script` reads the source of a model's methods, and `torch.jit.trace` calls the model again to check the
trace. The replaced methods are restored during such a call. Functions that were imported by name before the run are not
replaced; `is_exporting` detects most of them.

cloudpickle and dill pickle `model.score` with this function and its globals, so the globals here must be picklable:
`call_state` is unpickled without interceptors, even if nano_loop is not installed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from nano_loop.patching.attributes import defined_in, library, replaced, suspended
from nano_loop.patching.ownership import call_state
from nano_loop.patching.torch_private import is_tracing

#: The method through which a loop calls modules.
MODULE_CALL: tuple[type, str] = nn.Module, "__call__"
# Modules of torch's classes are called through __call__. Replacing their methods as well would affect every model.
_NOT_THE_USERS = frozenset({"torch", "builtins", "typing", "abc", "collections"})
# Trainer base classes. A method that overrides one of theirs is a hook for the trainer, not a computation.
_TRAINERS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"})
_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})


def called_by_loops(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model`, except parametrizations, which are called by accesses to `layer.weight`."""
    modules = list(model.modules())
    lists = [module for module in modules if isinstance(module, ParametrizationList)]
    parametrizations = {part for parametrization_list in lists for part in parametrization_list.modules()}
    return [module for module in modules if module not in parametrizations]


def entry_points(modules: list[nn.Module]) -> set[tuple[type, str]]:
    """Return the class attributes through which the loop can call any of `modules`."""
    methods = {MODULE_CALL}
    for kind in {type(module) for module in modules}:
        hooks = [nn.Module, *(base for base in kind.__mro__ if library(base) in _TRAINERS)]
        for owner in kind.__mro__:
            if library(owner) not in _NOT_THE_USERS | _TRAINERS:
                methods |= {(owner, name) for name, value in defined_in(owner).items() if _computes(name, value, hooks)}
    return methods


def _computes(name: str, value: object, hooks: list[type]) -> bool:
    """Whether a class attribute is a method that the loop may call for a computation."""
    lazy = inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value)
    if lazy or not inspect.isfunction(value):
        return False
    if name in _STEPS or name in ("forward", "__call__"):
        return True
    return not (name.startswith("_") or any(hasattr(base, name) for base in hooks))


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
