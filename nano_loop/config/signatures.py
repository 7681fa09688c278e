"""The options as parameters of a function: in its signature, its docstring, and for type checkers.

Type checkers read the declarations, so editors complete the names of options.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from nano_loop.config.declarations import DECLARED, Declarations, NanoDeclarations
from nano_loop.config.leftovers import LEFTOVERS
from nano_loop.errors import NanoWarning, error_message, shown

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Self = TypeVar("_Self")
_PLACE = re.compile(r"^( *)\{options\}$", re.MULTILINE)
_WIDTH = 116
# Resolved types, since annotations are strings that can be evaluated only in the module of `Declarations`.
_TYPES = get_type_hints(Declarations)


def _parameters_of(function: str) -> list[inspect.Parameter]:
    """Return the options as parameters of a function, with positional ones first."""
    kind = NanoDeclarations if function == "nano" else Declarations
    parameters = inspect.signature(kind).parameters.values()
    return [parameter.replace(annotation=_TYPES[parameter.name]) for parameter in parameters]


def with_options(function: _T) -> _T:
    """Add the options to the signature of a function with ``(*args, **others)``, before ``**others``, at run time."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    *own, others = signature.parameters.values()
    takes_positions = bool(own) and own[-1].kind is inspect.Parameter.VAR_POSITIONAL and own[-1].name == "args"
    if not takes_positions:
        options = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in _parameters_of("")]
    else:
        own = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
        options = _parameters_of(function.__name__)  # type: ignore[attr-defined]
    parameters = [*own, *options, others]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return documented(function)


def takes(options: Callable[_P, object]) -> Callable[[Callable[..., _T]], Callable[_P, _T]]:
    """Type `with_options` for a function."""
    return with_options


def method_takes(
    options: Callable[_P, object],
) -> Callable[[Callable[Concatenate[_Self, ...], _T]], Callable[Concatenate[_Self, _P], _T]]:
    """Type `with_options` for a method."""
    return with_options


def documented(owner: _T) -> _T:
    """Replace ``{options}`` in the docstring of `owner` with the entries of the options."""
    if owner.__doc__:  # python -OO removes docstrings
        owner.__doc__ = _PLACE.sub(lambda place: textwrap.indent(_entries(), place[1]), owner.__doc__)
    return owner


def named(function: str, args: Sequence[Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return `function`'s arguments by name. BigDL-Nano's without effect are removed, with a warning in its caller."""
    positional = [
        parameter.name for parameter in _parameters_of(function) if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(args) > len(positional):
        most = len(positional)
        raise TypeError(f"{function}() takes from 0 to {most} positional arguments but {len(args)} were given")
    arguments = dict(zip(positional, args, strict=False))
    for name in arguments.keys() & others.keys():
        raise TypeError(f"{function}() got multiple values for argument {name!r}")
    arguments |= others
    for name, leftover in LEFTOVERS.items():
        if name in arguments and leftover.tolerates(arguments[name]):
            got = shown(name, arguments.pop(name))
            warnings.warn(error_message(got, leftover.expected, "Omit it"), NanoWarning, stacklevel=3)
    return arguments


def _entries() -> str:
    """Return the options as numpydoc entries."""
    return "\n".join(
        f"{option.name} : {_in_words(option.type)}\n"
        + textwrap.fill(option.metadata["help"], _WIDTH, initial_indent="    ", subsequent_indent="    ")
        for option in DECLARED
    )


def _in_words(annotation: Any) -> str:
    """Return a type in numpydoc's notation: ``bool or "auto"`` for ``bool | Literal["auto"]``."""
    annotation = annotation.replace("PrecisionName", "int | str")  # too many to list here; the entry lists them
    return re.sub(r"Literal\[(.*?)\]", r"\1", annotation).replace(" | ", " or ").replace("'", '"')
