"""Shows how a function that `nano_loop.nano` cannot accelerate is written instead, with the user's own names."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from typing import Any

from nano_loop.errors import shown
from nano_loop.options import DEFAULTS, Options

_SIMPLE = (bool, int, float, str, type(None))
_SELF = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)


class Built:
    """What a function builds, as far as its source shows.

    Parameters
    ----------
    function : callable
        The function. Without its source, nothing is known.

    Attributes
    ----------
    optimizers : dict of str to list of str
        The models of each optimizer that is made of ``model.parameters()``, by its name.
    loaders : list of str
        The loaders: those that are made, or else those that loops with a backward iterate.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        nodes = [*ast.walk(_tree(function))]
        self.optimizers = dict(_optimizers(nodes))
        self.loaders = [*dict.fromkeys(_made_loaders(nodes))] or [*dict.fromkeys(_iterated(nodes))][:1]

    @property
    def is_certain(self) -> bool:
        """Whether the function builds an optimizer."""
        return bool(self.optimizers)

    def set_up(self) -> Iterator[str]:
        """Yield the lines that set up what the function builds."""
        loaders = self.loaders
        for optimizer, models in (self.optimizers or {"optimizer": ["model"]}).items():
            model = models[0] if len(models) == 1 else f"[{', '.join(models)}]"
            arguments = ", ".join([model, optimizer, *loaders])
            returned = [model, optimizer, *([f"[{', '.join(loaders)}]"] if len(loaders) > 1 else loaders)]
            yield f"{', '.join(returned)} = self.setup({arguments})"
            loaders = []


def as_torch_nano(
    function: Callable[..., Any], arguments: Mapping[str, Any], owner: Any, built: Built, options: Options
) -> str:
    """Return the code of a `TorchNano` for a function that builds its model.

    Parameters
    ----------
    function : callable
        The function.
    arguments : mapping of str to Any
        The arguments of its call.
    owner : Any
        The object whose method it is, or None.
    built : Built
        What it builds.
    options : Options
        The options of the call.
    """
    name = str(getattr(function, "__name__", "train"))
    kind = name.title().replace("_", "") if owner is None else type(owner).__name__
    parameters = _parameters(function, arguments)
    signature = inspect.Signature([_SELF, *parameters])
    body = ["...  # what builds them, as it is", *built.set_up(), "...  # the loop, as it is"]
    lines = [
        f"class {kind}(nano_loop.TorchNano):",
        f"    def train{signature}:",
        *textwrap.indent("\n".join(body), " " * 8).splitlines(),
        "",
        f"{kind}({', '.join(_given(options))}).train({', '.join(map(_passed, parameters))})",
    ]
    return textwrap.indent("\n".join(lines), "    ", lambda line: bool(line.strip()))


def _given(options: Options) -> Iterator[str]:
    """Yield the options that the user has written in the call."""
    for name, default in DEFAULTS.items():
        text = options.given.get(name, "")
        if text != shown(name, default) and text not in options.from_environment:
            yield text


class _Dots:
    def __repr__(self) -> str:
        return "..."


def _parameters(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[Parameter]:
    """Return the parameters of a function but for ``self``, with defaults that are short enough to be shown."""
    try:
        found = [*inspect.signature(function).parameters.values()]
    except ValueError:  # some builtins have no signature
        return [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in arguments]
    return [
        each.replace(
            annotation=Parameter.empty,
            default=each.default if each.default is each.empty or isinstance(each.default, _SIMPLE) else _Dots(),
        )
        for each in found
        if each.name != "self"
    ]


def _passed(parameter: Parameter) -> str:
    """Return how a call passes on a variable that has the name of a parameter."""
    name = parameter.name
    before: dict[Any, str] = {
        parameter.VAR_POSITIONAL: "*",
        parameter.VAR_KEYWORD: "**",
        parameter.KEYWORD_ONLY: f"{name}=",
    }
    return before.get(parameter.kind, "") + name


def _tree(function: Callable[..., Any]) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, no function, or a lambda in the midst of a line
        return ast.Module([], [])


def _optimizers(nodes: list[ast.AST]) -> Iterator[tuple[str, list[str]]]:
    for target, call in _assigned_calls(nodes):
        models = [
            ast.unparse(each.func.value)
            for argument in [*call.args, *(each.value for each in call.keywords)]
            for each in ast.walk(argument)
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "parameters"
        ]
        if models:
            yield target, [*dict.fromkeys(models)]


def _made_loaders(nodes: list[ast.AST]) -> Iterator[str]:
    for target, call in _assigned_calls(nodes):
        if ast.unparse(call.func).endswith("DataLoader"):
            yield target


def _assigned_calls(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1:
            yield ast.unparse(node.targets[0]), node.value


def _iterated(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield what the innermost loops with a backward iterate, as ``loader`` in ``enumerate(loader)``."""
    for node in nodes:
        if not isinstance(node, ast.For) or not _has_backward(node) or any(map(_has_backward, _inner_loops(node))):
            continue
        names = [each for each in ast.walk(node.iter) if isinstance(each, (ast.Name, ast.Attribute))]
        called = {id(each.func) for each in ast.walk(node.iter) if isinstance(each, ast.Call)}
        yield from (ast.unparse(each) for each in names[-1:] if id(each) not in called)


def _inner_loops(loop: ast.For) -> Iterator[ast.For]:
    return (each for part in loop.body for each in ast.walk(part) if isinstance(each, ast.For))


def _has_backward(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "backward" for each in ast.walk(node))
