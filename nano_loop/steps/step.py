"""The one shape that all steps have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import ClassVar, Literal

from nano_loop.cpu import Machine
from nano_loop.distributed.ranks import ALONE, Ranks
from nano_loop.intercept.calls import Entries
from nano_loop.options import Options
from nano_loop.parts import Parts
from nano_loop.report import StepResult


class Step(ABC):
    """One acceleration of one run.

    To add a step, write a subclass in a new file, and a line in `nano_loop.steps.STEPS`. A step says when
    it does not apply, how it is applied, and, where it applies itself, how that is undone:

    - `skip_reason` answers for one ``setup`` call, and changes nothing;
    - `apply` changes the parts in place. Right beside each change it hands the way back to ``self.undoing``, so that
      a step which fails halfway is undone too;
    - an object that it has changed before in this run (a model set up with a second optimizer) it leaves as it is.

    Parameters
    ----------
    config : Options
        The options of the run.
    machine : Machine
        What this process may use.
    entries : Entries
        Where a step puts what has to happen around the calls into a model.
    ranks : Ranks
        The processes of the run; a single one by default.
    """

    #: The step's name in the report; its option, where it has one, is called the same.
    name: ClassVar[str]
    #: The parts without which the step has nothing to do, and is silent: models, optimizers, either, loaders, or none.
    needs: ClassVar[Literal["models", "optimizers", "trained", "loaders"] | None] = "models"
    #: Whether the step is about the process, so that the first ``setup`` of a run does it for all of them.
    once: ClassVar[bool] = False
    #: Whether "auto" means reduced precision alone, so that an fp32 run that did not ask for the step is silent on it.
    auto_is_for_reduced_precision: ClassVar[bool] = False

    def __init__(self, config: Options, machine: Machine, entries: Entries, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.machine = machine
        self.entries = entries
        self.ranks = ranks
        self.undoing = ExitStack()

    @property
    def asked(self) -> bool:
        """Whether the options turn the step on; a step that is off is silent."""
        choice = getattr(self.config, self.name)
        if choice == "auto" and self.auto_is_for_reduced_precision:
            return self.config.reduced_precision or self.config.auto_precision
        return choice is not False

    @property
    def required(self) -> bool:
        """Whether the user asked for the step by name, so that skipping it is an error."""
        return getattr(self.config, self.name) is True

    def see(self, parts: Parts) -> None:  # noqa: B027
        """Take note of the parts of a ``setup`` call, also of one for which the step has nothing to do."""

    @abstractmethod
    def skip_reason(self, parts: Parts) -> str | None:
        """Say why the step does not apply to `parts`, in one line for the report; None where it applies."""

    @abstractmethod
    def apply(self, parts: Parts) -> str:
        """Change `parts` in place, and say what was done, in one line for the report."""

    def closing(self) -> StepResult | None:
        """Say what a run that has ended adds to the report, before it is undone; None for nothing."""
        return None

    def undo(self) -> None:
        """Put everything back that `apply` changed, the last change first."""
        self.undoing.close()


class RanksStep(Step):
    """A step that several ranks need and one does not: it has no option, and is silent with one."""

    required = False

    @property
    def asked(self) -> bool:
        """See `Step.asked`."""
        return self.ranks.size > 1

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        return None
