"""nano: a decorator that finds and sets up the models, optimizers and loaders that a call uses.

We search its arguments, including nested lists, tuples and dicts, and the attributes of ``self``. If none of these is a
model, we search the global and closure variables that the function uses.
"""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from nano_loop.config.declarations import NanoDeclarations
from nano_loop.config.options import Options
from nano_loop.config.signatures import named, takes, with_options
from nano_loop.distributed.comm.ranks import Loop
from nano_loop.distributed.launch_external.environment import found_launch
from nano_loop.distributed.payload.code_reductions import is_sent_by_name
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.patching.members import parameters_of
from nano_loop.patching.torch_private import is_loss
from nano_loop.patching.walk import CONTAINERS, attributes_of, find, items_of, length_of, walk
from nano_loop.runtime.objects.report import LastPrinted, SetupReport
from nano_loop.runtime.objects.training_objects import TrainingObjects, check_loop
from nano_loop.runtime.run import Run, RunTask
from nano_loop.runtime.settings import Settings

_KINDS = (nn.Module, Optimizer, DataLoader)
_DEEPEST = 4  # for example: an attribute, a dict in it, an object in the dict, an attribute of the object
_LONGEST = 1000  # items of a list: longer ones hold samples and histories
_NAMESPACES = (SimpleNamespace, argparse.Namespace)


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults."""
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
    """Return the object that a method is bound to; None for a plain function."""
    return function.__self__ if inspect.ismethod(function) else arguments.get("self")


# --- self ---


def _held_by(owner: Any) -> Iterator[Any]:
    """Yield the training objects in an object, its containers, and attributes of instances of the user's classes."""
    packages = frozenset(("__main__", _package(type(owner))))  # their classes count as the user's own

    def contents(value: Any) -> Iterable[Any]:
        if isinstance(value, _KINDS):
            return ()
        if isinstance(value, CONTAINERS):
            return items_of(value) if length_of(value) <= _LONGEST else ()
        return attributes_of(value) if _is_plain(value, packages) else ()

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
    start = inspect.unwrap(getattr(function, "__func__", function))
    functions = walk([start] if isinstance(start, FunctionType) else [], _functions_around)
    around = [variable for reached in functions for variable in _around(reached).items()]
    return {name: value for name, value in around if _has_parts(value)}


def _has_parts(value: Any) -> bool:
    return any(True for _ in find(_KINDS, value))


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


_METHODS = (staticmethod, classmethod)
_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_S = TypeVar("_S")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)
_AS_TORCH_NANO = """

    class Training(nano_loop.TorchNano):
        def train(self, *args):
            ...  # the code that builds them, unchanged
            model, optimizer, loader = self.setup(model, optimizer, loader)
            ...  # the loop, unchanged

    Training().train(*args)  # with the options of nano: Training(precision=...)
"""


class Accelerated(Protocol[_P, _R_co]):
    """A decorated function, as type checkers see it: it has the signature of the function."""

    __name__: str
    #: The report of the last call; None before the first.
    report: SetupReport | None

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        """Call it."""

    @overload
    def __get__(self, instance: None, owner: Any, /) -> Accelerated[_P, _R_co]: ...
    @overload
    def __get__(
        self: Accelerated[Concatenate[_S, _Q], _R], instance: _S, owner: Any = None, /
    ) -> Accelerated[_Q, _R]: ...
    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        """Return a bound method for an object, and the function itself for a class."""


class Decorator(Protocol):
    """The decorator that `nano` returns when it is called with options."""

    def __call__(self, function: Callable[_P, _R], /) -> Accelerated[_P, _R]:
        """Decorate a function."""


@overload
def nano(function: Callable[_P, _R], /) -> Accelerated[_P, _R]: ...
@overload
@takes(NanoDeclarations)
def nano(*args: Any, **others: Any) -> Decorator:
    # Overloads never run. jedi completes arguments by the call that receives them.
    return cast("Decorator", NanoDeclarations(**others))


@with_options
def nano(*args: Any, **others: Any) -> Any:
    """Accelerate a training function: ``@nano`` or ``@nano(precision="bf16", ...)`` above ``def train(...)``.

    Each call sets up, in place, the models, optimizers and loaders among the arguments, including those in lists,
    tuples and dicts, and in attributes of ``self``. If none of these is a model, it sets up those in the global and
    closure variables that the function uses. When the call ends, all changes are undone. Losses without parameters are
    not changed.

    Parameters
    ----------
    {options}
    **others
        ``strategy``, and ``accelerator``, ``devices``, ``num_nodes`` and ``plugins`` with their values for one CPU, are
        accepted for compatibility with BigDL-Nano, with a `NanoWarning`. Any other name is an error.

    Returns
    -------
    callable
        The decorator; for ``@nano`` without options, the decorated function. The decorated function has an attribute
        ``report``, the `SetupReport` of its last call, or None before the first call.

    Raises
    ------
    NanoConfigError
        If options are invalid, or if the function is a class, a generator function or an async function. A call
        raises it if no model is found.

    Examples
    --------
    >>> import torch
    >>> @nano(precision="auto", verbose=False)
    ... def train(model, optimizer, batches):
    ...     for x, y in batches:
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.mse_loss(model(x), y).backward()
    ...         optimizer.step()
    >>> model = torch.nn.Linear(4, 1)
    >>> train(model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.rand(8, 4), torch.rand(8, 1))])
    """
    options = named("nano", args, others)
    function = options.get("num_processes")
    if callable(function) or isinstance(function, _METHODS):  # @nano without parentheses
        options |= {"num_processes": None}
        return _decorated(function, options, Settings.read(options))
    settings = Settings.read(options)
    settings.expected_ranks()  # raises for an invalid option here, not at the first call
    return functools.partial(_decorated, options=options, settings=settings)


class _Call(RunTask):
    """A call of ``function(*args, **kwargs)`` with the models, optimizers and loaders that it uses set up."""

    def __init__(
        self, settings: Settings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        parts, names = _parts_and_names(settings, function, args, kwargs)
        loop = Loop(getattr(function, "__name__", "the function"), "nano_loop")
        super().__init__(settings, names, loop)
        self._function, self._args, self._kwargs = function, args, kwargs
        self._parts = parts  # pickled with the arguments, to be the same objects on each rank

    @override
    def do(self, run: Run) -> Any:
        run.apply(self._parts)
        return self._function(*self._args, **self._kwargs)


def _decorated(function: Any, options: dict[str, Any], settings: Settings) -> Any:
    if isinstance(function, _METHODS):  # @nano above @staticmethod
        return type(function)(_decorated(function.__func__, options, settings))
    check_loop(function, _name(function))
    settings.prepare(function)

    printed = LastPrinted()

    @functools.wraps(function)
    def accelerated(*args: Any, **kwargs: Any) -> Any:
        accelerated.report = None  # type: ignore[attr-defined]
        task = _Call(Settings.read(options), function, args, kwargs)
        run = Run(task.settings, task, printed=printed)
        try:
            return run.complete()
        finally:
            accelerated.report = run.report  # type: ignore[attr-defined]

    accelerated.report = None  # type: ignore[attr-defined]
    return accelerated


def _parts_and_names(
    settings: Settings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TrainingObjects, dict[str, Any]]:
    """Return the objects that a call sets up, and the user's objects among them by name."""
    arguments = arguments_of(function, args, kwargs)
    parts = parts_in(arguments, owner_of(function, arguments))
    around = {} if parts else variables_around(function)
    parts = parts or parts_in(around)
    got = f"{_name(function)}({', '.join(arguments)})"
    if parts is None:
        raise NanoConfigError(_without_model(got, function))
    if around and _starts_workers(settings.options) and is_sent_by_name(inspect.unwrap(function)):
        got = f"{got} uses the global variable{'s' * (len(around) > 1)} {', '.join(around)}"
        expected = f"worker processes import {function.__module__} again, and would train different objects"
        advice = f"Pass them as arguments: def {function.__name__}({', '.join([*arguments, *around])})"
        raise NanoConfigError(error_message(got, expected, advice))
    return parts, {**arguments, **around, _name(function): function}


def _starts_workers(options: Options) -> bool:
    return options.processes > 1 and found_launch(os.environ) is None


def _without_model(got: str, function: Callable[..., Any]) -> str:
    expected = (
        "nano accelerates the models among the arguments, including those in lists, tuples and dicts, those in "
        "attributes of self, and those in variables around the function"
    )
    advice = (
        f"Pass the model as an argument. If {_name(function)} builds it, or belongs to a library, call it in a block "
        "`with nano_loop.accelerated():`, or, for several processes, write it as the train method of a TorchNano"
    )
    return error_message(f"{got} was called without a model", expected, advice) + _AS_TORCH_NANO


def _name(function: Any) -> str:
    kind = type(function).__name__
    return str(getattr(function, "__qualname__", kind if callable(function) else repr(function)))
