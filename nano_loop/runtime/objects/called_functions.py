"""The names in the code of a model: ``dropout`` of `torch.nn.functional.dropout` in `forward` or a function it calls.

They show which steps may apply. A name may also be that of an attribute; the step then finds nothing to compute.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn

from nano_loop.patching.attributes import defined_in
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.walk import CONTAINERS, code_in, items_of, length_of, walk

_MOST = 1000  # maximum number of functions of a class and those that they call
_LONGEST = 1000  # maximum length of a list of layers: longer ones hold data


def names_called(model: nn.Module) -> frozenset[str]:
    """Return the names in the code of a model's modules, except torch's, and of what it calls, without running it."""
    named = functools.cache(_named)  # for this call only: classes of a library call the same functions
    return frozenset().union(*(_names_in(kind, named) for kind in _classes_in(model)))


@contextmanager
def variables_kept(model: nn.Module) -> Iterator[None]:
    """Restore, on exit, variables outside a model that its code names, which calls of a copy change, too."""
    own = (function for kind in _classes_in(model) for function in _functions_of(kind, _named)[0])
    functions = {function for function in own if type(function) is FunctionType}
    with ExitStack() as stack:
        values = []
        for function in functions:
            variables = function.__globals__
            for name in _named(function)[0] & variables.keys():
                values.append(variables[name])
                stack.callback(variables.__setitem__, name, variables[name])
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    values.append(cell.cell_contents)
                    stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
        for value in walk(values, items_of, most=_MOST):
            if isinstance(value, (list, set, dict, deque)):
                stack.callback(_refill, value, copy.copy(value))
        yield


def _refill(container: Any, before: Any) -> None:
    """Give a container its former contents, unless they are still the same objects."""
    if [*map(id, container)] != [*map(id, before)] or [*map(id, items_of(container))] != [*map(id, items_of(before))]:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _classes_in(model: nn.Module) -> set[Any]:
    return {type(value) for value in walk([model], _modules_in) if isinstance(value, nn.Module)}


def _modules_in(value: Any) -> Iterator[Any]:
    """Yield the modules in a module, and in its lists and dicts, in which Keras stores layers."""
    if isinstance(value, nn.Module):
        yield from value.children()
        yield from (attribute for attribute in vars(value).values() if isinstance(attribute, CONTAINERS))
    elif length_of(value) <= _LONGEST:
        yield from (item for item in items_of(value) if isinstance(item, (nn.Module, *CONTAINERS)))


#: The names in a function's code, and the functions that these refer to.
_Named = Callable[[Any], tuple[frozenset[str], tuple[Any, ...]]]
#: The names by class. A class that is made for a model, as by a parametrization, may hold the model in a closure of its
#: functions. So neither is kept.
_names: Any = WeakIdKeyDictionary()  # its `get` is untyped


def _names_in(kind: type, named: _Named) -> frozenset[str]:
    names: frozenset[str] | None = _names.get(kind)
    if names is None:
        own, others = _functions_of(kind, named)
        names = frozenset(function.__name__ for function in others).union(*(named(function)[0] for function in own))
        _names[kind] = names
    return names


def _functions_of(kind: type, named: _Named) -> tuple[list[Any], list[Any]]:
    """Return the functions of a class's package that its methods may call, with the methods, and those of others."""
    bases = [base for base in kind.__mro__ if _package(base) != "torch"]
    packages = {_package(base) for base in bases}
    methods = [
        inspect.unwrap(value) for base in bases for value in defined_in(base).values() if inspect.isfunction(value)
    ]

    def called(function: Any) -> Iterable[Any]:
        return named(function)[1] if type(function) is FunctionType and _package(function) in packages else ()

    reached = [*walk(methods, called, most=_MOST)]
    own = [function for function in reached if _package(function) in packages]
    return own, [function for function in reached if _package(function) not in packages]


def _named(function: Any) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Return the names in the code of a function, and the functions that these refer to, also through modules."""
    if type(function) is not FunctionType:
        return frozenset(), ()
    names = frozenset(name for code in code_in(function.__code__) for name in code.co_names)

    def named_in(value: Any) -> Iterable[Any]:
        names_of = function.__globals__ if value is function else vars(value) if _is_module(value) else {}
        return (names_of[name] for name in names if name in names_of)

    values = walk([function], named_in)
    return names, tuple(value for value in values if type(value) in (FunctionType, BuiltinFunctionType))


def _is_module(value: Any) -> bool:
    return issubclass(type(value), ModuleType)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
