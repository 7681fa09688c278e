"""A run of the ambient mode for models and optimizers that are trained together. It lasts as long as they do."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.run import Run


class Training:
    """A run for models that are trained together, which ends when all that it holds, weakly, have been freed.

    Parameters
    ----------
    outer : Run or None
        The run that it is inside of. None: nothing is set up.

    Attributes
    ----------
    models : WeakIdKeyDictionary
        The models, as keys.
    has_ended : bool
        Whether its run has.
    """

    def __init__(self, outer: Run | None) -> None:
        self._run = None if outer is None else outer.inner()
        self._owners: list[weakref.finalize[..., Any]] = []
        self.models: Any = WeakIdKeyDictionary()
        self.has_ended = False

    def hold(self, owner: nn.Module | Optimizer) -> None:
        """Last as long as `owner`, at the least."""
        finalizer = weakref.finalize(owner, self._release)
        finalizer.atexit = False
        self._owners.append(finalizer)

    def apply(self, parts: TrainingObjects, result: StepResult) -> None:
        """Set up parts, with an entry of the report for them."""
        if self._run is None:
            return
        try:
            self._run.apply(parts, [result])
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Undo what was set up."""
        self.has_ended = True
        for finalizer in self._owners:
            finalizer.detach()
        if self._run is not None:
            self._run.__exit__(None, None, None)

    def _release(self) -> None:
        if not any(finalizer.alive for finalizer in self._owners):
            self.end()
