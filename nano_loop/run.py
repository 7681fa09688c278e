"""The life of one run: ranks joined, steps applied at each setup, all undone at the end, and the report.

Every face (`nano_loop.TorchNano`, `nano_loop.nano`, `nano_loop.accelerated`) enters a `Run` and does nothing else.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from nano_loop.cpu import Machine, format_cpu_list, read_machine
from nano_loop.distributed.launch.joining import expected_ranks, joined
from nano_loop.distributed.launch.launcher import Launcher
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat
from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.intercept.calls import Entries
from nano_loop.options import Options
from nano_loop.parts import Parts
from nano_loop.report import SetupReport, StepResult
from nano_loop.steps import STEPS, GradientAveraging, Step
from nano_loop.this_version import refuse_what_is_not_in_this_version
from nano_loop.version import __version__


@dataclass(frozen=True)
class Settings:
    """What a run begins with: the options, and the machine for which they were resolved."""

    options: Options
    machine: Machine

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> Settings:
        """Read the options of a call and of the environment, and the machine.

        Raises
        ------
        NanoConfigError
            If options cannot be used; all of them are named.
        NanoError
            If what is asked for is not in this version.
        """
        options, machine = Options.from_call(arguments), read_machine()
        refuse_what_is_not_in_this_version(options)
        return cls(options.resolved(machine), machine)

    def expected_ranks(self) -> Ranks:
        """Return this process's place in its next run, as far as it is known before."""
        return expected_ranks(self.options)


class Task(ABC):
    """What a face does in a run, the same on every rank. Ranks in other processes do a pickled copy of it.

    Parameters
    ----------
    settings : Settings
        Those of the run.
    names : mapping of str to Any
        The user's own objects in the task, by the names that the user knows, for a message about one that cannot be
        pickled. They are not pickled themselves.
    """

    def __init__(self, settings: Settings, names: Mapping[str, Any]) -> None:
        self.settings = settings
        self.names = names

    @abstractmethod
    def do(self, run: Run) -> Any:
        """Do it, in a run that has begun."""

    def run_in(self, seat: Seat) -> Any:
        """Do it in a process whose launcher has joined the ranks already."""
        with Run(self.settings, self, seat=seat) as run:
            return self.do(run)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled."""
        return {**vars(self), "names": {}}


class Run:
    """One run, as a context: entering it joins the ranks, and leaving it undoes every step, the last one first.

    Parameters
    ----------
    settings : Settings
        The options and the machine.
    task : Task, optional
        What ranks in other processes do; None for a run of one process.
    seat : Seat, optional
        This process's place in a run whose ranks have been joined already.
    launcher : Launcher, optional
        Joins the ranks; by default the one that the options and the environment ask for.

    Attributes
    ----------
    report : SetupReport or None
        What was applied and skipped; None before the first `setup`.
    """

    def __init__(
        self,
        settings: Settings,
        task: Task | None = None,
        *,
        seat: Seat | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self.report: SetupReport | None = None
        self._options = settings.options
        self._joined = nullcontext(seat) if seat else joined(settings.options, settings.machine, task, launcher)
        self._seat: Seat | None = None
        self._entries = Entries()
        self._steps: list[Step] = []
        self._ending = ExitStack()

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run, as this process sees them."""
        return self._place.ranks

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            seat = self._seat = stack.enter_context(self._joined)
            stack.callback(self._leave)
            self._steps = [step(self._options, seat.machine, self._entries, seat.ranks) for step in STEPS]
            stack.callback(self._entries.close)
            for step in self._steps:
                stack.callback(step.undo)
            stack.push(self._close_report)
            self._ending = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._ending.__exit__(kind, error, traceback)

    def setup(self, model: Any, optimizer: Any = (), *dataloaders: DataLoader[Any]) -> Any:
        """Accelerate models, optimizers and loaders in place, until the run ends.

        Parameters
        ----------
        model : torch.nn.Module, or a list or tuple of them
            Gets the layout and the precision that the options ask for; its parameters stay the same objects.
        optimizer : torch.optim.Optimizer, or a list or tuple of them
            Is switched to fused kernels where they fit.
        *dataloaders : torch.utils.data.DataLoader
            Keep their class and their attributes.

        Returns
        -------
        tuple
            ``(model, optimizer)``, ``(model, optimizer, loader)``, or with several loaders
            ``(model, optimizer, [loader, ...])``: the very objects that were given.

        Raises
        ------
        NanoConfigError
            If an argument is of another kind, or an option that was asked for by name cannot be honoured.
        NanoError
            If the run has not begun or has ended.
        """
        self.apply(Parts.of(model, optimizer, dataloaders))
        if not dataloaders:
            return model, optimizer
        return model, optimizer, dataloaders[0] if len(dataloaders) == 1 else list(dataloaders)

    def apply(self, parts: Parts) -> None:
        """Apply the steps to the parts of one ``setup`` call, and print what is new in the report.

        Raises
        ------
        NanoConfigError
            If a step does not apply that the user asked for by name.
        """
        seat = self._place
        for step in self._steps:
            step.see(parts)
        results = [self._apply(step, parts) for step in self._steps if self._concerns(step, parts)]
        if self.report is None:
            self.report = self._empty_report(seat)
            self.report.add(results)
            self._print([self.report])
        else:
            self._print(self.report.add(results))

    def without_averaging(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the gradients of `model` stay those of this rank."""
        averaging = next(step for step in self._steps if isinstance(step, GradientAveraging))
        return averaging.paused([model])

    @property
    def _place(self) -> Seat:
        if self._seat is None:
            given = "setup was called outside a run"
            needed = "what it changes is put back when the run ends"
            raise NanoError(problem(given, needed, "Call it between the run's beginning and its end"))
        return self._seat

    def _leave(self) -> None:
        self._seat = None

    def _close_report(self, kind: type[BaseException] | None, *_: object) -> None:
        """Add what steps have to say at the end of a run that did not raise."""
        if kind is None and self.report is not None:
            self._print(self.report.add([result for step in self._steps if (result := step.closing())]))

    def _print(self, lines: Sequence[SetupReport | StepResult]) -> None:
        if lines and self._options.verbose and self.ranks.rank == 0:
            print(*lines, sep="\n", file=sys.stderr, flush=True)

    def _concerns(self, step: Step, parts: Parts) -> bool:
        if not step.asked or (step.once and self.report is not None):
            return False
        return step.needs is None or bool(getattr(parts, step.needs))

    def _apply(self, step: Step, parts: Parts) -> StepResult:
        reason = step.skip_reason(parts)
        if reason is None:
            return StepResult(step.name, "applied", step.apply(parts))
        if step.required:
            raise NanoConfigError(
                problem(f"{step.name}=True", reason, f'Leave it out, which means "auto": {step.name}')
            )
        return StepResult(step.name, "skipped", reason)

    def _empty_report(self, seat: Seat) -> SetupReport:
        return SetupReport(
            title=_title(seat),
            machine=seat.machine.as_dict(),
            options=_plain(self._options.as_dict()),
            from_environment=self._options.from_environment,
        )


def _plain(value: Any) -> Any:
    """Turn options into what JSON holds."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, type(None))) else repr(value)


def _title(seat: Seat) -> str:
    machine, ranks = seat.host, seat.ranks
    quota = "" if machine.quota is None else f" (quota {machine.quota:g})"
    used = ", ".join(format_cpu_list(cpus) for cpus in ranks.shares or [machine.allowed])
    threads = torch.get_num_threads()
    hosts = "" if ranks.on_one_host else f", {ranks.local_size} on this host"
    parts = [
        f"nano_loop {__version__}",
        f"{ranks.size} process{'es' if ranks.size > 1 else ''}{hosts} × {threads} thread{'s' if threads > 1 else ''}",
        f"CPUs {used} of {len(machine.logical_cpus)}{quota}",
        ", ".join([machine.name, *_bf16_instructions(machine)]),
    ]
    return " · ".join(parts)


def _bf16_instructions(machine: Machine) -> list[str]:
    return [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in machine.instruction_sets]
