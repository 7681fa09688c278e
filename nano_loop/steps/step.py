"""The base classes of all steps."""

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
    """Base class of a step: one acceleration in one run.

    To add a step, write a subclass in a new module and add it to `nano_loop.steps.STEPS`. A step defines when it does
    not apply, how it is applied, and how it is undone:

    - `skip_reason` is called for each ``setup`` call and changes nothing.
    - `apply` changes the parts in place. With each change, it registers the inverse in ``self.undoing``, so that a step
      that fails halfway is also undone.
    - An object that the step has already changed in this run is not changed again, for example a model that is set up
      with a second optimizer.

    Parameters
    ----------
    config : Options
        The options of the run.
    machine : Machine
        The machine, limited to the CPUs that this process may use.
    entries : Entries
        Registers layers around the calls into a model.
    ranks : Ranks
        The processes of the run; a single one by default.
    """

    #: The name of the step in the report, and of its option if it has one.
    name: ClassVar[str]
    #: The kind of parts that the step needs; without any, it is not in the report. "trained": models or optimizers.
    needs: ClassVar[Literal["models", "optimizers", "trained", "loaders"] | None] = "models"
    #: Whether the step changes the whole process, so that only the first ``setup`` of a run applies it.
    once: ClassVar[bool] = False
    #: Whether "auto" enables the step in reduced precision only. An fp32 run then does not report it.
    auto_is_for_reduced_precision: ClassVar[bool] = False

    def __init__(self, config: Options, machine: Machine, entries: Entries, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.machine = machine
        self.entries = entries
        self.ranks = ranks
        self.undoing = ExitStack()

    @property
    def asked(self) -> bool:
        """Whether the options enable the step. A disabled step is not in the report."""
        choice = getattr(self.config, self.name)
        if choice == "auto" and self.auto_is_for_reduced_precision:
            return self.config.reduced_precision or self.config.auto_precision
        return choice is not False

    @property
    def required(self) -> bool:
        """Whether the user requested the step explicitly, so that skipping it is an error."""
        return getattr(self.config, self.name) is True

    def concerns(self, parts: Parts) -> bool:
        """Return whether the step is in the report for `parts`."""
        return self.needs is None or bool(getattr(parts, self.needs))

    def see(self, parts: Parts) -> None:  # noqa: B027
        """Inspect the parts of a ``setup`` call, including calls to which the step does not apply."""

    @abstractmethod
    def skip_reason(self, parts: Parts) -> str | None:
        """Return why the step does not apply to `parts`, in one line for the report, or None if it applies."""

    @abstractmethod
    def apply(self, parts: Parts) -> str:
        """Change `parts` in place, and return a description of the change, in one line for the report."""

    def closing(self) -> StepResult | None:
        """Return a final result for the report at the end of the run, before `undo`, or None."""
        return None

    def undo(self) -> None:
        """Undo all changes of `apply`, in reverse order."""
        self.undoing.close()


class RanksStep(Step):
    """Base class of a step that is needed with several ranks only. It has no option."""

    required = False

    @property
    def asked(self) -> bool:
        """See `Step.asked`."""
        return self.ranks.size > 1

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        return None
