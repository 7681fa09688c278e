"""Pickling of modules and functions that torch or a decorator has wrapped, compiled or given another class."""

from __future__ import annotations

import importlib
import marshal
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize

from nano_loop.distributed.payload.shared_files import Reduction, reduced
from nano_loop.patching.torch_private_compiler import compile_call, compile_context, compiled_call, uncompiled
from nano_loop.patching.walk import named_attributes_of

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE, set for classes defined in Python

# --- modules ---


def reduce_module(module: nn.Module) -> Reduction | None:
    """Add the result of `module.compile()`, which `nn.Module` omits, and recreate special modules."""
    # parametrize.is_parametrized() would confuse a compiled module with the original.
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


def _reduce_parametrized(module: nn.Module) -> Reduction:
    """Pickle a module with a class that torch generated for it and that rejects pickling."""
    computed: Any = module.parametrizations
    kind: Any = parametrize.type_before_parametrizations(module)
    owner = module
    if kind.__getstate__ is nn.RNNBase.__getstate__:  # it computes the weights, which may change the module
        owner = kind.__new__(kind)
        vars(owner).update(vars(module))
    return _parametrized, (kind, [*computed]), kind.__getstate__(owner), None, None, _set_parametrized


def _parametrized(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """Return an empty instance of a subclass of `kind` that computes the attributes in `names`."""
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


def reduce_code(code: CodeType) -> Reduction:
    """Pickle code with its file and lines, some of which cloudpickle omits in some versions."""
    return marshal.loads, (marshal.dumps(code),)


def reduce_function(function: FunctionType) -> Reduction | None:
    """Make a function findable behind the decorator that replaced it in its module, and recompile it."""
    outer = None
    for inner in _importable_chain(function):
        if inner is function and outer is not None:
            return getattr, (outer, "__wrapped__")
        if inner is function:
            name = f"{function.__module__}:{function.__qualname__}"
            return None if at_its_name(function) is function else (pkgutil.resolve_name, (name,))
        if inner.__globals__.get("__name__") not in by_value():  # the script's are not found in another process
            outer = inner
    context = compile_context(function)
    return (context, (uncompiled(function),)) if context else _reduce_unnamed(function)


def _reduce_unnamed(function: FunctionType) -> Reduction | None:
    """Let a function that is not found by its name use its module's actual globals, which cloudpickle would copy."""
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    if module is None or vars(module) is not function.__globals__ or not vars(module).get("__spec__"):
        return None
    if is_found(function) or not _is_named(module):
        return None
    attributes, cells = function_contents(function)
    attributes |= {name: getattr(function, name) for name in _OF_NAMED}
    make = _function_of, (module.__name__, function.__code__, function.__name__)
    return *make, (attributes, cells), None, None, set_function


_OF_NAMED = ("__annotations__", "__qualname__", "__module__", "__doc__")  # named functions get these from their source


def _function_of(module: str, code: CodeType, name: str) -> FunctionType:
    """Return a new function with the globals of a module, and with empty cells."""
    scope = vars(importlib.import_module(module))
    return FunctionType(code, scope, name, None, tuple(CellType() for _ in code.co_freevars))


def function_contents(function: FunctionType) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return the attributes of a function, and the closure variables that it uses."""
    defaults = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    cells = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            cells.append((name, cell.cell_contents))
    return {**vars(function), **defaults}, cells


def set_function(function: FunctionType, contents: tuple[Mapping[str, Any], Iterable[tuple[str, Any]]]) -> None:
    """Set the contents of a function to those of another one with the same code."""
    attributes, cells = contents
    for name, value in attributes.items():
        setattr(function, name, value)
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, value in cells:
        held[name].cell_contents = value


def in_main(value: type | FunctionType, reduction: Reduction) -> Reduction:
    """Make a class or function of the script an attribute of `__main__` in a worker, which may pickle instances."""
    if sys.modules.get(value.__module__) is not sys.modules["__main__"] or at_its_name(value) is not value:
        return reduction
    make, arguments, *others = reduction
    return _made_in_main, (value.__module__, value.__qualname__, make, arguments), *others


def _made_in_main(module: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    value, main = make(*arguments), sys.modules["__main__"]
    value.__qualname__ = name  # for nested classes, cloudpickle keeps only the last part
    setattr(sys.modules.setdefault(module, main), name, value)
    return value


def is_sent_by_name(function: Callable[..., Any]) -> bool:
    """Whether a worker imports a function by name, instead of receiving its code and globals."""
    return isinstance(function, FunctionType) and function in _importable_chain(function)


def _importable_chain(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the object found under `function`'s name in another process, and those it wraps, outermost first."""
    outer = None if is_sent(function.__module__) else at_its_name(function)
    while isinstance(outer, FunctionType):
        yield outer
        outer = vars(outer).get("__wrapped__")


def at_its_name(value: type | FunctionType) -> Any:
    """Return the object found under the module and name of a class or function in this process, or None."""
    there: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        there = getattr(there, name, None)
    return there


def reduce_imported(module: ModuleType) -> Reduction | None:
    """Pickle an object that a library has put in place of its module by name."""
    is_object = type(module) is not ModuleType and sys.modules.get(module.__name__) is module
    return (importlib.import_module, (module.__name__,)) if is_object else None


class NamedObjects:
    """Finds objects that a module names, such as ``MISSING = object()``: without data, or of the standard library."""

    def __init__(self) -> None:
        self._places: dict[type, dict[int, tuple[ModuleType, str]]] = {}

    def place_of(self, value: Any) -> tuple[ModuleType, str] | None:
        """Return the module and name of an object, or None for other objects."""
        kind = type(value)
        if kind not in self._places:
            self._places[kind] = self._places_of(kind)
        place = self._places[kind].get(id(value))
        has_data = next(named_attributes_of(value), None) is not None
        return None if has_data and str(kind.__module__) not in sys.stdlib_module_names else place

    def _places_of(self, kind: type) -> dict[int, tuple[ModuleType, str]]:
        own: list[Any] = [kind.__reduce_ex__, kind.__reduce__]
        if own != [object.__reduce_ex__, object.__reduce__] or (kind is not object and not kind.__flags__ & _HEAP_TYPE):
            return {}
        modules = sys.modules.copy().values() if kind is object else [sys.modules.get(kind.__module__)]
        return {
            id(value): (module, name)
            for module in modules
            if isinstance(module, ModuleType) and _is_named(module) and vars(module).get("__spec__")
            for name, value in vars(module).copy().items()
            if type(value) is kind
        }


def _is_named(module: ModuleType) -> bool:
    """Return whether another process gets the same module by its name."""
    return sys.modules.get(module.__name__) is module and module.__name__ not in by_value()


def is_found(value: type | FunctionType) -> bool:
    """Whether another process can import a class or function by its name."""
    return not is_sent(value.__module__) and at_its_name(value) is value


def is_sent(module: str) -> bool:
    """Whether a module is sent by value: the script, and modules registered by the user."""
    return any(f"{module}.".startswith(f"{name}.") for name in by_value())


def by_value() -> tuple[str, ...]:
    """Return the modules that are sent by value: the script, and modules registered by the user."""
    return ("__main__", *cloudpickle.list_registry_pickle_by_value())
