"""Modules whose source has been edited since this process has imported them: workers get the caller's, by value.

A worker imports from disk, so it would compute by other code. Python keeps no source, so functions and constants in
memory are compared with what the file defines now. That is done for files that are newer than this process.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from nano_loop.cpu.parent_process import process_start
from nano_loop.distributed.payload.payload import dump, load
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.attributes import defined_in
from nano_loop.patching.walk import code_in

# Lists and dicts may have been filled since the import.
_LITERALS = (bool, int, float, complex, str, bytes, tuple, type(None))


def send_edited_modules(folder: Path) -> None:
    """Write the modules that have been edited, as this process has them, to a new folder; without any, do nothing.

    Raises
    ------
    NanoError
        If such a module has something that cannot be pickled.
    """
    modules = {name: module for name, module in [*sys.modules.items()] if _is_edited(name, module)}
    if not modules:
        return
    folder.mkdir()
    with ExitStack() as stack:
        for module in modules.values():
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            dump(modules, folder, {})
        except NanoError as error:
            got = f"{', '.join(modules)}: edited on disk since this program has imported it"
            expected = f"workers need the version of this program, and it cannot be sent ({error})"
            raise NanoError(error_message(got, expected, "Start the program anew, or reload the module")) from error


def take_edited_modules(folder: Path) -> None:
    """Have the caller's modules in this process, before others are imported; without a folder, do nothing."""
    if not folder.exists():
        return
    modules: dict[str, ModuleType] = load(folder)
    for name in sorted(modules):
        parent, _, last = name.rpartition(".")
        sys.modules[name] = modules[name]
        if parent:
            setattr(importlib.import_module(parent), last, modules[name])


def _is_edited(name: str, module: object) -> bool:
    """Whether a module of a source file defines other code or constants than that file does now."""
    spec = getattr(module, "__spec__", None)
    if type(module) is not ModuleType or spec is None or spec.name != name or type(spec.loader) is not SourceFileLoader:
        return False  # another loader may compile in another way, as pytest's does
    try:
        if os.stat(spec.origin).st_ctime < process_start():
            return False
    except OSError:  # it has gone, which the worker says
        return False
    try:
        source = decode_source(Path(spec.origin).read_bytes())
        known = {*map(_identity, code_in(compile(source, spec.origin, "exec", dont_inherit=True)))}
    except (OSError, SyntaxError, ValueError):  # it is being edited
        return True
    values = [*_values_in(module)]
    functions = [function.__code__ for function in map(_function, values) if function is not None]
    if any(code.co_filename == spec.origin and _identity(code) not in known for code in functions):
        return True
    names = vars(module)
    return any(key in names and not _is_equal(names[key], value) for key, value in _constants(source))


def _identity(code: CodeType) -> tuple[Any, ...]:
    """Return what two code objects have in common that do the same, wherever they stand."""
    constants = [_identity(value) if isinstance(value, CodeType) else _as_text(value) for value in code.co_consts]
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return (code.co_code, code.co_flags, *names, tuple(constants))


def _as_text(value: object) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _values_in(module: ModuleType) -> Iterator[Any]:
    """Yield the values of a module, and of the classes that it defines."""
    for value in [*vars(module).values()]:
        yield value
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from defined_in(value).values()


def _function(value: Any) -> Any:
    """Return the function behind a method or a decorator, or None."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    value = inspect.unwrap(value) if inspect.isfunction(value) else value
    return value if inspect.isfunction(value) else None


def _constants(source: str) -> Iterator[tuple[str, Any]]:
    """Yield the names that a source gives a literal to at its outermost level, and nothing else anywhere."""
    tree = ast.parse(source)
    stored = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    stored.update(node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias))
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        try:
            literal = ast.literal_eval(node.value)
        except (ValueError, TypeError, SyntaxError):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and stored[target.id] == 1 and type(literal) in _LITERALS:
                yield target.id, literal


def _is_equal(value: Any, literal: Any) -> bool:
    return type(value) is type(literal) and repr(value) == repr(literal)
