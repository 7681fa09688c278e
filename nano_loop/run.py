"""The life cycle of a run: it joins the ranks, applies the steps at each setup, undoes them, and fills the report.

Every public entry point (`nano_loop.TorchNano`, `nano_loop.nano`, `nano_loop.accelerated`) is a thin layer over `Run`.
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
    """The settings of a run: the options, and the machine for which they were resolved."""

    options: Options
    machine: Machine

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> Settings:
        """Read the options from the arguments of a call and from the environment, and inspect the machine.

        Raises
        ------
        NanoConfigError
            If options are invalid. The message lists all of them.
        NanoError
            If this version does not support an option.
        """
        options, machine = Options.from_call(arguments), read_machine()
        refuse_what_is_not_in_this_version(options)
        return cls(options.resolved(machine), machine)

    def expected_ranks(self) -> Ranks:
        """Return this process's place in its next run, as far as it is known before the run starts."""
        return expected_ranks(self.options)


class Task(ABC):
    """The work of a run, the same on every rank. Ranks in other processes execute a pickled copy.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    names : mapping of str to Any
        The user's objects in the task, by their names in the user's code. An error about an object that cannot be
        pickled uses these names. The mapping itself is not pickled.
    """

    def __init__(self, settings: Settings, names: Mapping[str, Any]) -> None:
        self.settings = settings
        self.names = names

    @abstractmethod
    def do(self, run: Run) -> Any:
        """Execute the task in a started run."""

    def run_in(self, seat: Seat) -> Any:
        """Execute the task in a process whose launcher has already joined the ranks."""
        with Run(self.settings, self, seat=seat) as run:
            return self.do(run)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle."""
        return {**vars(self), "names": {}}


class Run:
    """One run, as a context manager: it joins the ranks on entry and undoes all steps, in reverse order, on exit.

    Parameters
    ----------
    settings : Settings
        The options and the machine.
    task : Task, optional
        The work of ranks in other processes. None for a run of one process.
    seat : Seat, optional
        This process's place in a run whose ranks have already been joined.
    launcher : Launcher, optional
        Joins the ranks. By default, the options and the environment select it.

    Attributes
    ----------
    report : SetupReport or None
        The steps that were applied and skipped. None before the first `setup`.
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
        """The ranks of the run, from the view of this process."""
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
            The models. They run in the layout and the precision that the options select. Their parameters stay the
            same objects.
        optimizer : torch.optim.Optimizer, or a list or tuple of them
            The optimizers. Those that support fused kernels are switched to them.
        *dataloaders : torch.utils.data.DataLoader
            The loaders. They keep their class and their attributes.

        Returns
        -------
        tuple
            ``(model, optimizer)``, ``(model, optimizer, loader)``, or with several loaders
            ``(model, optimizer, [loader, ...])``. These are the same objects that were passed.

        Raises
        ------
        NanoConfigError
            If an argument has the wrong type, or an explicitly requested option cannot be applied.
        NanoError
            If the run has not started or has ended.
        """
        self.apply(Parts.of(model, optimizer, dataloaders))
        if not dataloaders:
            return model, optimizer
        return model, optimizer, dataloaders[0] if len(dataloaders) == 1 else list(dataloaders)

    def apply(self, parts: Parts) -> None:
        """Apply the steps to the parts of one ``setup`` call, and print the new entries of the report.

        Raises
        ------
        NanoConfigError
            If an explicitly requested step does not apply.
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
        """Return a context in which the gradients of `model` are not averaged over the ranks."""
        averaging = next(step for step in self._steps if isinstance(step, GradientAveraging))
        return averaging.paused([model])

    @property
    def _place(self) -> Seat:
        if self._seat is None:
            given = "setup was called outside a run"
            needed = "its changes are undone when the run ends"
            raise NanoError(problem(given, needed, "Call it while the run is active"))
        return self._seat

    def _leave(self) -> None:
        self._seat = None

    def _close_report(self, kind: type[BaseException] | None, *_: object) -> None:
        """Add the closing results of the steps to the report, unless the run raised."""
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
    """Convert option values to types that JSON supports."""
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
