"""How modules and functions are pickled that torch or a decorator has wrapped, compiled or given another class."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize

from nano_loop.distributed.payload.buffers import Reduction, reduced
from nano_loop.patching.torch_private import compile_call, compile_context, compiled_call, uncompiled

# --- modules ---


def reduce_module(module: nn.Module) -> Reduction | None:
    """Add what `module.compile()` has set, which `nn.Module` leaves behind; make special modules anew."""
    if isinstance(module, torch.jit.ScriptModule):
        return _reduce_scripted(module)
    # parametrize.is_parametrized() would take a compiled module for the one that is compiled.
    if "parametrizations" in dict(module.named_children()) and parametrize.is_parametrized(module):
        return _reduce_parametrized(module)
    context = compile_context(compiled_call(module))
    if context is None:
        return None
    make, arguments, state = reduced(module)[:3]
    return make, arguments, (state, context), None, None, _set_compiled_module


def _set_compiled_module(module: nn.Module, state: tuple[Any, Any]) -> None:
    attributes, context = state
    module.__setstate__(attributes)  # type: ignore[no-untyped-call]
    compile_call(module, context)


def _reduce_scripted(module: torch.jit.ScriptModule) -> Reduction:
    """Pickle a scripted module as `torch.jit.save` does, and its tensors beside that, for optimizers hold them too."""
    content = io.BytesIO()
    torch.jit.save(module, content)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return _scripted, (content.getvalue(),), tensors, None, None, _set_tensors


def _scripted(content: bytes) -> Any:
    return torch.jit.load(io.BytesIO(content))  # type: ignore[no-untyped-call]


def _set_tensors(module: torch.jit.ScriptModule, tensors: dict[str, torch.Tensor]) -> None:
    modules = dict(module.named_modules())
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        setattr(modules[owner], attribute, tensor)


def _reduce_parametrized(module: nn.Module) -> Reduction:
    """Pickle a module whose class torch has made for it alone, and that refuses."""
    computed: Any = module.parametrizations
    state = nn.Module.__getstate__(module)  # type: ignore[no-untyped-call]
    make = _parametrized, (parametrize.type_before_parametrizations(module), [*computed])
    return *make, state, None, None, _set_parametrized


def _parametrized(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """Return an instance of `kind`, of a class that computes the attributes in `names`, and empty otherwise."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(1)))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return module


def _set_parametrized(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).clear()
    module.__setstate__(state)  # type: ignore[no-untyped-call]


# --- functions ---


def reduce_function(function: FunctionType) -> Reduction | None:
    """Let a function be found behind the decorator that has replaced it in its module, and be compiled again."""
    outer = _importable(function)
    if outer is function:
        return None
    while isinstance(outer, FunctionType):
        inner = vars(outer).get("__wrapped__")
        if inner is function:
            return getattr, (outer, "__wrapped__")
        outer = inner
    context = compile_context(function)
    return context and (_call, (context, uncompiled(function)))


def is_sent_by_name(function: Callable[..., Any]) -> bool:
    """Whether a worker imports a function, rather than gets its code and the global variables that it uses."""
    outer = _importable(function) if isinstance(function, FunctionType) else None
    while isinstance(outer, FunctionType):
        if outer is function:
            return True
        outer = vars(outer).get("__wrapped__")
    return False


def _importable(function: FunctionType) -> Any:
    """Return what another process finds where `function` says that it is from; None if it has nothing there."""
    by_value = ("__main__", *cloudpickle.list_registry_pickle_by_value())  # what a user has registered
    if any(f"{function.__module__}.".startswith(f"{name}.") for name in by_value):
        return None
    value: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        value = getattr(value, name, None)
    return value


def reduce_imported(module: ModuleType) -> Reduction | None:
    """Pickle by name what a library has put in place of its module; cloudpickle knows plain modules alone."""
    replaced = type(module) is not ModuleType and sys.modules.get(module.__name__) is module
    return (importlib.import_module, (module.__name__,)) if replaced else None


def _call(function: Callable[[Any], Any], argument: Any) -> Any:
    return function(argument)
