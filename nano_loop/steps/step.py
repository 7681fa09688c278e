"""The base classes of all steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from typing_extensions import override

from nano_loop.autotune.tuner import Budget
from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.distributed.comm.ranks import ALONE, Ranks
from nano_loop.optimizers.split import SplitWeights
from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.runtime.clock import StepClock
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects

#: See `SkipReason.idle`: there is nothing for the step to change, or everything is too small for a gain.
ABSENT, SMALL = "nothing to do", "too small to gain"


class SkipReason(NamedTuple):
    """Why a step does not apply."""

    code: str  # a short, stable identifier, such as "no_norm"
    detail: str  # one line, for the report
    #: The line that lists an "auto" step with others: `ABSENT`, `SMALL`, or a precision; "" if the step has its own.
    idle: str = ""

    @classmethod
    def of_all(cls, reasons: Sequence[SkipReason | None]) -> SkipReason | None:
        """Return one reason for several objects, or None if the step applies to one of them."""
        known = dict.fromkeys(reason for reason in reasons if reason is not None)
        if None in reasons or not known:
            return None
        codes, idle = dict.fromkeys(reason.code for reason in known), {reason.idle for reason in known}
        return cls(",".join(codes), "; ".join(reason.detail for reason in known), idle.pop() if len(idle) == 1 else "")


@dataclass(frozen=True)
class StepContext:
    """The view that steps have of a run."""

    options: Options
    machine: Machine  # limited to the CPUs that this process may use
    interceptors: CallInterceptors
    ranks: Ranks = ALONE
    #: Returns a context in which a copy of a model is accelerated with the run's options, or with those passed by name.
    accelerated: Callable[..., AbstractContextManager[Any]] = nullcontext
    clock: StepClock = field(default_factory=StepClock)

    @cached_property
    def budget(self) -> Budget:
        """The time for all measurements of the run."""
        return Budget(self.clock, measures=self.ranks.rank == 0)

    @cached_property
    def split_weights(self) -> SplitWeights:
        """The low-order bits that the run's bf16 weights lack relative to fp32."""
        return SplitWeights()


class Step(ABC):
    """Base class of a step: one acceleration in one run.

    To add a step, write a subclass in a new module and add it to `nano_loop.steps.STEPS`. A step defines when it does
    not apply, how it is applied, and how it is undone:

    - `begin` initializes the state of the step. It is called when a run begins, and again when it has ended.
    - `skip_reason` is called for each ``setup`` call and changes nothing.
    - `apply` changes the parts in place. With each change, it registers the inverse in ``self.undoing``, so that a step
      that fails halfway is also undone.
    - Code that must run before or after steps of the run's optimizers subscribes to ``self.clock``.
    - An object that the step has already changed in this run, such as a model that is set up with a second optimizer,
      is not changed again.
    """

    #: The name of the step in the report, and of its option if it has one.
    name: ClassVar[str]
    #: The kind of objects that the step needs. Without any, it is not in the report. "trained": models or optimizers.
    needs: ClassVar[Literal["models", "optimizers", "trained", "loaders"] | None] = "models"
    #: Whether the step changes the whole process, so that only the first ``setup`` of a run applies it.
    once: ClassVar[bool] = False
    #: Codes of reasons to skip the step that are no error for True: torch's own setting has no effect there, either.
    harmless: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, context: StepContext) -> None:
        self.options = context.options
        self.machine = context.machine
        self.interceptors = context.interceptors
        self.ranks = context.ranks
        self.accelerated = context.accelerated
        self.clock = context.clock
        self.budget = context.budget
        self.split_weights = context.split_weights
        self.undoing = ExitStack()
        self.begin()

    def begin(self) -> None:  # noqa: B027
        """Set the state of the step to its value before the first ``setup``."""

    @property
    def enabled(self) -> bool:
        """Whether the options enable the step. A disabled step is not in the report."""
        choice = getattr(self.options, self.name, None)
        return choice is not None and choice is not False

    @property
    def required(self) -> bool:
        """Whether the user requested the step explicitly, so that skipping it is an error."""
        return self.options.is_asked_for(self.name)

    @property
    def unused_because(self) -> str | None:
        """Why the applied step changes no calls of the models that were set up so far; None if it may."""
        return None

    def is_relevant(self, parts: TrainingObjects) -> bool:
        """Return whether the step is in the report for `parts`."""
        return self.needs is None or bool(getattr(parts, self.needs))

    def observe(self, parts: TrainingObjects) -> None:  # noqa: B027
        """Inspect the parts of a ``setup`` call, including calls to which the step does not apply."""

    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        """Return why the step does not apply to `parts`, or None if it applies, as it does by default."""
        return None

    @abstractmethod
    def apply(self, parts: TrainingObjects) -> str:
        """Change `parts` in place, and return a description of the change, in one line for the report."""

    def final_result(self) -> StepResult | None:
        """Return a final result for the report at the end of the run, before `undo`, or None."""
        return None

    def undo(self) -> None:
        """Undo all changes of `apply`, in reverse order, and forget what was set up."""
        try:
            self.undoing.close()
        finally:
            self.begin()


class RanksStep(Step):
    """Base class of a step that is needed only with several ranks. It has no option."""

    @property
    @override
    def enabled(self) -> bool:
        return self.ranks.size > 1
