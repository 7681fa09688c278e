"""The functions that the code of a model names: `torch.nn.functional.dropout` in a `forward`, or in what that calls."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from nano_loop.patching.walk import CONTAINERS, code_in, items_of, length_of, walk

_LOAD_GLOBAL, _CACHE = dis.opmap["LOAD_GLOBAL"], dis.opmap.get("CACHE")
#: By instruction, the flags of its argument that are not the index of a name: they come with Python 3.11 and 3.12.
_SHIFTS = {
    dis.opmap[name]: int(sys.version_info >= since)
    for name, since in {"LOAD_GLOBAL": (3, 11), "LOAD_ATTR": (3, 12), "LOAD_METHOD": (4,)}.items()
    if name in dis.opmap
}
_MOST = 1000  # functions of a class and those that they call
_LONGEST = 1000  # items of a list that holds layers, and not data


def functions_called(model: nn.Module) -> frozenset[str]:
    """Return the names of the functions of libraries that the classes of a model's modules call.

    They are found in the methods of the classes, but for torch's own, and in functions of the same package that these
    name as globals. No code of the program's runs: a module may import a package when it is asked for an attribute.
    """
    kinds: set[Any] = {type(value) for value in walk([model], _modules_in) if isinstance(value, nn.Module)}
    return frozenset().union(*map(_called_by, kinds))


def _modules_in(value: Any) -> Iterator[Any]:
    """Yield the modules in a module, and its lists and dicts: Keras keeps layers in them."""
    if isinstance(value, nn.Module):
        yield from value.children()
        yield from (attribute for attribute in vars(value).values() if isinstance(attribute, CONTAINERS))
    elif length_of(value) <= _LONGEST:
        yield from (item for item in items_of(value) if isinstance(item, (nn.Module, *CONTAINERS)))


@functools.lru_cache(maxsize=1000)
def _called_by(kind: type) -> frozenset[str]:
    own = [base for base in kind.__mro__ if _package(base) != "torch"]
    methods = [value for base in own for value in vars(base).values() if inspect.isfunction(value)]
    packages = {_package(base) for base in own}

    def contents(value: Any) -> Iterator[Any]:
        if type(value) is FunctionType and _package(value) in packages:
            for code in code_in(value.__code__):
                yield from _globals_of(value, code)

    reached = [*walk(map(inspect.unwrap, methods), contents, most=_MOST)]
    names = {value.__name__ for value in reached if _is_function(value) and _package(value) not in packages}
    return frozenset(names) | frozenset(value for value in reached if type(value) is str)


def _globals_of(function: FunctionType, code: CodeType) -> Iterator[Any]:
    """Yield the globals that code names, and what it names in modules among them, such as ``nn.functional.dropout``.

    What a module makes when it is asked for it, as ``torch.ops`` does, is only a name.
    """
    for name, *attributes in _paths_in(code):
        value: Any = function.__globals__.get(name)
        for attribute in attributes:
            if not issubclass(type(value), ModuleType):
                break
            value = vars(value).get(attribute, attributes[-1])
            if not _is_function(value) and not issubclass(type(value), (ModuleType, str)):
                value = attribute
        if _is_function(value) or type(value) is str:
            yield value


def _is_function(value: Any) -> bool:
    return issubclass(type(value), (FunctionType, BuiltinFunctionType, type))


@functools.lru_cache(maxsize=10_000)  # the classes of a library call the same functions
def _paths_in(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that code loads, each with what it loads of it then: ``("nn", "functional", "dropout")``."""
    paths: list[tuple[str, ...]] = []
    is_path, extended = False, 0
    # `dis.get_instructions` takes 5 us an instruction: 0.2 s for what Keras' layers call.
    for opcode, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if opcode == _CACHE:
            continue
        place, extended = extended | argument, 0
        if opcode == dis.EXTENDED_ARG:
            extended = place << 8
        elif opcode == _LOAD_GLOBAL:
            paths.append((code.co_names[place >> _SHIFTS[opcode]],))
            is_path = True
        elif opcode in _SHIFTS and is_path:
            paths[-1] += (code.co_names[place >> _SHIFTS[opcode]],)
        else:
            is_path = False
    return tuple(paths)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
