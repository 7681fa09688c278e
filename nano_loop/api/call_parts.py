"""The models, optimizers and loaders that a call of a decorated function uses.

We search its arguments, including nested lists, tuples and dicts, and the attributes of ``self``. If none of these is a
model, we search the global and closure variables that the function uses.
"""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.patching.members import parameters_of
from nano_loop.patching.torch_private import is_loss
from nano_loop.patching.walk import CONTAINERS, find, items_of, length_of, named_attributes_of, walk
from nano_loop.runtime.objects.training_objects import TrainingObjects

_KINDS = (nn.Module, Optimizer, DataLoader)
_DEEPEST = 4  # for example: an attribute, a dict in it, an object in the dict, an attribute of the object
_LONGEST = 1000  # items of a list: longer ones hold samples and histories
_NAMESPACES = (SimpleNamespace, argparse.Namespace)


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults and those that a partial function adds."""
    if isinstance(function, functools.partial):
        passed, placeholder = iter(args), getattr(functools, "Placeholder", function)  # of Python 3.14
        added = [next(passed, value) if value is placeholder else value for value in function.args]
        return arguments_of(function.func, (*added, *passed), {**function.keywords, **kwargs})
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # some builtins have no signature
        return {"args": args, **kwargs}
    try:
        call = signature.bind(*args, **kwargs)
    except TypeError:
        function(*args, **kwargs)  # raises Python's own error for such a call
        raise
    call.apply_defaults()
    return dict(call.arguments)


def parts_in(values: Mapping[str, Any], owner: Any = None) -> TrainingObjects | None:
    """Return the training objects in the values and in the attributes of `owner`; None if there is no model."""
    objects = [*find(_KINDS, values), *_held_by(owner)]
    objects = list({id(item): item for item in objects}.values())
    modules = [item for item in objects if isinstance(item, nn.Module)]
    models = [module for module in modules if any(True for _ in parameters_of(module))]
    models = models or [module for module in modules if not is_loss(module)]
    if not models:
        return None
    optimizers = [item for item in objects if isinstance(item, Optimizer)]
    return TrainingObjects(models, optimizers, [item for item in objects if isinstance(item, DataLoader)])


def owner_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return the object that a method is bound to, or that is called; None for a plain function."""
    if isinstance(function, functools.partial):
        return owner_of(function.func, arguments)
    if inspect.ismethod(function):
        return function.__self__
    return arguments.get("self") if inspect.isroutine(function) else function


# --- self ---


def _held_by(owner: Any) -> Iterator[Any]:
    """Yield the training objects in an object, its containers, and attributes of instances of the user's classes."""
    packages = frozenset(("__main__", _package(type(owner))))  # their classes count as the user's own

    def contents(value: Any) -> Iterable[Any]:
        if isinstance(value, _KINDS):
            return ()
        if isinstance(value, CONTAINERS):
            return items_of(value) if length_of(value) <= _LONGEST else ()
        return dict(named_attributes_of(value)).values() if _is_plain(value, packages) else ()

    return (value for value in walk([owner], contents, depth=_DEEPEST) if isinstance(value, _KINDS))


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_plain(value: Any, packages: frozenset[str]) -> bool:
    """Whether a value is an instance of a user's class, but not a dataset, a sampler or a scheduler."""
    if isinstance(value, _NAMESPACES):
        return True
    kind = type(value)
    return _package(kind) in packages - {"builtins"} and all(_package(base) != "torch" for base in kind.__mro__)


# --- variables around the function ---


def variables_around(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the training objects among the global and closure variables that a function uses, by name.

    Functions of the same file that it uses are searched as well.
    """
    start = code_run_by(function)
    functions = walk([start] if isinstance(start, FunctionType) else [], _functions_around)
    around = [variable for reached in functions for variable in _around(reached).items()]
    return {name: value for name, value in around if any(True for _ in find(_KINDS, value))}


def code_run_by(function: Any) -> Any:
    """Return the function that runs when a method, a partial function, a wrapper or another object is called."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return function if inspect.isroutine(function) else inspect.unwrap(type(function).__call__)


def _functions_around(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions of the same file that a function uses."""
    for value in _around(function).values():
        if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
            yield value


def _around(function: FunctionType) -> dict[str, Any]:
    """Return the global and closure variables that a function uses."""
    names = _global_names(function.__code__)
    around = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            around[name] = cell.cell_contents
    return around


@functools.lru_cache(maxsize=1000)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Return the global variables that code reads but does not assign, in the order of the code."""
    instructions = [*dis.get_instructions(code)]
    read = [instruction.argval for instruction in instructions if instruction.opname == "LOAD_GLOBAL"]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            read += _global_names(constant)
    assigned = {instruction.argval for instruction in instructions if instruction.opname == "STORE_GLOBAL"}
    return tuple(name for name in dict.fromkeys(read) if name not in assigned)
