"""The children of a module whose `forward` only calls them in turn, by its source.

The code is read and not run: a trace would repeat what else a `forward` does, such as counting its calls.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn

#: Names of children, in the order of their calls.
Names = tuple[str, ...]


def children_in_turn(module: nn.Module) -> tuple[nn.Module, ...] | None:
    """Return the modules that a call of a module passes its only argument through, or None if it does anything else."""
    if type(module) is nn.Sequential:
        return tuple(module)
    kind = type(module)
    if "forward" in vars(module) or kind.__module__.partition(".")[0] == "torch":
        return None
    names = _names_called(inspect.unwrap(kind.forward)) if inspect.isfunction(kind.forward) else None
    if names is None or any(hasattr(kind, name) for name in names):  # a property may return another module
        return None
    children = dict(module.named_children())
    return tuple(children[name] for name in names) if set(names) <= set(children) else None


@functools.lru_cache(maxsize=1000)
def _names_called(forward: Callable[..., Any]) -> Names | None:
    """Return what `forward` calls in turn, if that is all that it does."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # typed in at a prompt, or made by code
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or not _has_one_argument(function.args):
        return None
    owner, argument = (parameter.arg for parameter in function.args.args)
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    called: dict[str, Names] = {argument: ()}
    for statement in body[:-1]:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != owner:
                passed = _passed(value, owner, called)
            case _:
                return None
        if passed is None:
            return None
        called = {name: passed}  # what another name holds is not used again, or this returns None
    if not body or not isinstance(body[-1], ast.Return):
        return None
    return _passed(body[-1].value, owner, called)


def _has_one_argument(arguments: ast.arguments) -> bool:
    """Whether there are `self` and another argument, and nothing else."""
    others = (arguments.posonlyargs, arguments.kwonlyargs, arguments.defaults, arguments.vararg, arguments.kwarg)
    return len(arguments.args) == 2 and not any(others)


def _passed(value: ast.expr | None, owner: str, called: dict[str, Names]) -> Names | None:
    """Return the children that an expression passes a value through, or None for another expression."""
    match value:
        case ast.Name(id=name):
            return called.get(name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=child), args=[inner], keywords=[]):
            before = _passed(inner, owner, called) if name == owner else None
            return None if before is None else (*before, child)
        case _:
            return None
