"""Runs the steps of one run: each applied in order at every ``setup``, all undone when the run ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from nano_loop.cpu import Machine, format_cpu_list
from nano_loop.distributed.seat import Seat
from nano_loop.errors import NanoConfigError, problem
from nano_loop.intercept.calls import Entries
from nano_loop.options import Options
from nano_loop.parts import Parts
from nano_loop.report import SetupReport, StepResult
from nano_loop.steps import STEPS, GradientAveraging, Step
from nano_loop.version import __version__


class Pipeline:
    """The steps of one run, as a context: leaving it undoes them, the last one first.

    Parameters
    ----------
    config : Options
        The options.
    seat : Seat
        The place of this process among the ranks, and what it may use of the machine.
    """

    def __init__(self, config: Options, seat: Seat) -> None:
        self.config = config
        self.seat = seat
        self.report: SetupReport | None = None
        self._entries = Entries()
        self._steps = [step(config, seat.machine, self._entries, seat.ranks) for step in STEPS]
        self._undoing = ExitStack()

    def __enter__(self) -> Pipeline:
        self._undoing.callback(self._entries.close)
        for step in self._steps:
            self._undoing.callback(step.undo)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.report is not None:
                self._print(self.report.add([result for step in self._steps if (result := step.closing())]))
        finally:
            self._undoing.close()

    def apply(self, parts: Parts) -> None:
        """Apply the steps to the parts of one ``setup`` call, and print what is new in the report.

        Raises
        ------
        NanoConfigError
            If a step does not apply that the user asked for by name.
        """
        for step in self._steps:
            step.see(parts)
        results = [self._apply(step, parts) for step in self._steps if self._concerns(step, parts)]
        if self.report is None:
            self.report = self._empty_report()
            self.report.add(results)
            self._print([self.report])
        else:
            self._print(self.report.add(results))

    def without_averaging(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the gradients of `model` stay those of this rank."""
        averaging = next(step for step in self._steps if isinstance(step, GradientAveraging))
        return averaging.paused([model])

    def _print(self, lines: Sequence[SetupReport | StepResult]) -> None:
        if lines and self.config.verbose and self.seat.ranks.rank == 0:
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

    def _empty_report(self) -> SetupReport:
        return SetupReport(
            title=_title(self.seat),
            machine=self.seat.machine.as_dict(),
            options=_plain(self.config.as_dict()),
            from_environment=self.config.from_environment,
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
