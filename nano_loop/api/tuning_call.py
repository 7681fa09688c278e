"""The function `tune`, which measures which options of nano_loop are the fastest for a model, a batch and a loss."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from torch import nn
from typing_extensions import override

from nano_loop.distributed.comm.ranks import Loop
from nano_loop.errors import NanoConfigError, error_message, shown
from nano_loop.precision.verification.verification import LossFunction
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.run import Run, RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.search.requested import options_of_environment
from nano_loop.search.result import Row, Tuning
from nano_loop.search.search import SECONDS, search


def tune(
    model: Any,
    optimizer: Any,
    batch: Any,
    loss_fn: LossFunction,
    *,
    seconds: float = SECONDS,
    again: bool = False,
    **options: Any,
) -> Tuning:
    """Measure which options of nano_loop are the fastest for a model, an optimizer, a batch and a loss.

    Copies of the model take steps under each candidate, in processes that are thrown away. The model, the optimizer and
    the states of random generators stay as they are, bit for bit. A candidate counts only if `verify` finds that its
    numbers differ from fp32 by rounding alone.

    Parameters
    ----------
    model : torch.nn.Module
        The model, in the mode (train or eval) in which it is trained.
    optimizer : torch.optim.Optimizer, or a list or tuple of them
        The optimizers.
    batch : object
        What `loss_fn` takes: tensors, in tuples, lists and dicts.
    loss_fn : callable
        Takes a model and the batch, and returns the loss, a tensor of one element.
    seconds : float
        How long the search may take, about.
    again : bool
        Whether to search also if the result of an earlier search is kept.
    **options
        Options of `nano`. They stay as they are given.

    Returns
    -------
    Tuning
        ``print(...)`` for a table, ``.options`` to pass on, ``.line`` to paste, ``.rows``, ``.as_dict()`` for JSON,
        ``.plot(path)`` for a picture.

    Raises
    ------
    NanoConfigError
        If an option or an argument is invalid.
    NanoError
        If the model cannot be copied to another process, or a step of it fails.

    Examples
    --------
    >>> import torch, nano_loop
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> tuning = nano_loop.tune(model, optimizer, torch.rand(4, 8), lambda m, x: m(x).mean())  # doctest: +SKIP
    >>> tuning.line  # doctest: +SKIP
    '@nano(num_threads=1)'
    """
    _check(model, seconds, loss_fn)
    settings = Settings.read(options)
    task = _OnBatch(settings, model, optimizer, batch, loss_fn)
    return search(task, settings, {*options, *options_of_environment(settings.options)}, seconds, again)


class _OnBatch(RunTask):
    """Steps of an optimizer on one batch."""

    def __init__(self, settings: Settings, model: Any, optimizer: Any, batch: Any, loss_fn: LossFunction) -> None:
        names = {"model": model, "optimizer": optimizer, "batch": batch, "loss_fn": loss_fn}
        self._parts = TrainingObjects.of(model, optimizer, ())
        super().__init__(settings, names, Loop("tune", "nano_loop"), self._parts)
        self._batch, self._loss_fn = batch, loss_fn

    @override
    def do(self, run: Run) -> None:
        run.apply(self._parts)
        self.repeat(run)

    @override
    def repeat(self, run: Run) -> None:
        (model,) = self._parts.models
        for optimizer in self._parts.optimizers:
            optimizer.zero_grad()
        self._loss_fn(model, self._batch).backward()  # type: ignore[no-untyped-call]
        for optimizer in self._parts.optimizers:
            optimizer.step()


def _check(model: Any, seconds: Any, loss_fn: Any) -> None:
    problems = []
    if not isinstance(model, nn.Module):
        expected = "it measures a torch.nn.Module"
        problems.append(error_message(f"tune of a {type(model).__name__}", expected, "Pass the model first"))
    if not callable(loss_fn):
        got = f"loss_fn is a {type(loss_fn).__name__}"
        problems.append(error_message(got, "it takes a model and a batch, and returns the loss", "Pass a function"))
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < float(seconds) < math.inf:
        problems.append(error_message(shown("seconds", seconds), "it must be a positive number", "Leave it out for 90"))
    if problems:
        raise NanoConfigError("\n".join(problems))


__all__ = ["Row", "Tuning", "tune"]
