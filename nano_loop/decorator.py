"""nano: a decorator that finds models, optimizers and loaders among the arguments of a call and sets them up."""

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

    Each call sets up, in place, the models, optimizers and loaders among the arguments, including those in lists,
    tuples and dicts. When the call ends, all changes are undone. Losses without parameters are not changed.

    Parameters
    ----------
    {options}
    **others
        ``strategy`` is accepted for compatibility with BigDL-Nano and raises a `NanoWarning`. Any other name is an
        error.

    Returns
    -------
    callable
        The decorator; for ``@nano`` without options, the decorated function. The decorated function has an attribute
        ``report``, the `SetupReport` of its last call, or None before the first call.

    Raises
    ------
    NanoConfigError
        If options are invalid, or if the function is a class, a generator function or an async function. A call
        raises it if there is no model among the arguments.

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
    Settings.read(options).expected_ranks()  # raises for an invalid option here, not at the first call
    return functools.partial(_decorated, options=options)


class _Call(Task):
    """``function(*args, **kwargs)``, with the models, optimizers and loaders among its arguments set up."""

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
        needed = "nano accelerates the models among the arguments, including those in lists, tuples and dicts"
        raise NanoConfigError(problem(given, needed, "Pass the model as an argument"))
    return Parts(models, list(find(Optimizer, arguments)), list(find(DataLoader, arguments)))


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `function` by name, including defaults."""
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


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))
