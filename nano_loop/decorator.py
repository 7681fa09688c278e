"""nano: finds what to set up among the arguments of a call, and delegates."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.checks import check_loop
from nano_loop.errors import NanoConfigError, problem
from nano_loop.intercept.nested import find
from nano_loop.intercept.torch_private import is_loss
from nano_loop.options import Options
from nano_loop.parts import Parts
from nano_loop.run import Run, Settings, Task
from nano_loop.signatures import named, takes, with_options

_METHODS = (staticmethod, classmethod)


@overload
def nano(function: Callable[..., Any], /) -> Any: ...
@overload
@takes(Options)
def nano(*args: Any, **others: Any) -> Any: ...
@with_options
def nano(*args: Any, **others: Any) -> Any:
    """Accelerate a training function: ``@nano`` or ``@nano(precision="bf16", ...)`` above ``def train(...)``.

    At each call, the models, optimizers and loaders among the arguments, also in lists, tuples and dicts, are set up
    in place, and are as they were when the call ends. Losses without parameters are left alone.

    Parameters
    ----------
    {options}
    **others
        ``strategy`` is tolerated for BigDL-Nano's sake, with a `NanoWarning`. Any other name is an error.

    Returns
    -------
    callable
        The decorator; for ``@nano`` without options, the decorated function. A decorated function's ``report`` is the
        `SetupReport` of its last call, None before the first.

    Raises
    ------
    NanoConfigError
        If options cannot be used, if the function is a class, a generator or async, or, when it is called, if there
        is no model among its arguments.

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
        return _decorated(function, options | {"num_processes": None})
    Settings.read(options).expected_ranks()  # a wrong option is an error where it stands, and not at the first call
    return functools.partial(_decorated, options=options)


class _Call(Task):
    """``function(*args, **kwargs)``, with what is among its arguments set up."""

    def __init__(
        self, settings: Settings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(settings, {**_arguments(function, args, kwargs), _name(function): function})
        self._function, self._args, self._kwargs = function, args, kwargs

    def do(self, run: Run) -> Any:
        """See `Task.do`."""
        run.apply(_parts(self._function, self._args, self._kwargs))
        return self._function(*self._args, **self._kwargs)


def _decorated(function: Any, options: dict[str, Any]) -> Any:
    if isinstance(function, _METHODS):  # @nano above @staticmethod
        return type(function)(_decorated(function.__func__, options))
    check_loop(function, _name(function))

    @functools.wraps(function)
    def accelerated(*args: Any, **kwargs: Any) -> Any:
        task = _Call(Settings.read(options), function, args, kwargs)
        run = Run(task.settings, task)
        try:
            with run:
                return task.do(run)
        finally:
            accelerated.report = run.report  # type: ignore[attr-defined]

    accelerated.report = None  # type: ignore[attr-defined]
    return accelerated


def _parts(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parts:
    arguments = _arguments(function, args, kwargs)
    models = [module for module in find(nn.Module, arguments) if any(True for _ in module.parameters())]
    models = models or [module for module in find(nn.Module, arguments) if not is_loss(module)]
    if not models:
        given = f"{_name(function)}({', '.join(arguments)}) was called without a model"
        needed = "nano accelerates the torch.nn.Module among the arguments, also in lists, tuples and dicts"
        raise NanoConfigError(problem(given, needed, "Pass the model as an argument"))
    return Parts(models, list(find(Optimizer, arguments)), list(find(DataLoader, arguments)))


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what `function` will get, by name and with its defaults."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # some builtins have none
        return {"args": args, **kwargs}
    try:
        call = signature.bind(*args, **kwargs)
    except TypeError:
        function(*args, **kwargs)  # raises what Python says of such a call
        raise
    call.apply_defaults()
    return dict(call.arguments)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))
