"""nano: a decorator that finds and sets up the models, optimizers and loaders that a call uses."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from typing_extensions import override

from nano_loop.api.call_parts import arguments_of, code_run_by, owner_of, parts_in, variables_around
from nano_loop.config.declarations import NanoDeclarations
from nano_loop.config.signatures import named, takes, with_options
from nano_loop.distributed.comm.ranks import Loop
from nano_loop.distributed.launch_external.environment import found_launch
from nano_loop.distributed.payload.code_reductions import is_sent_by_name
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.runtime.objects.training_objects import TrainingObjects, check_loop
from nano_loop.runtime.run import Run, RunTask
from nano_loop.runtime.settings import Settings

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

    printed: list[str] = []

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
    code = code_run_by(function)
    if around and settings.options.processes > 1 and found_launch(os.environ) is None and is_sent_by_name(code):
        got = f"{got} uses the global variable{'s' * (len(around) > 1)} {', '.join(around)}"
        expected = f"worker processes import {code.__module__} again, and would train different objects"
        advice = f"Pass them as arguments: def {code.__name__}({', '.join([*arguments, *around])})"
        raise NanoConfigError(error_message(got, expected, advice))
    return parts, {**arguments, **around, _name(function): function}


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
