"""Prints the report of a run. The reasons of skipped steps come from `nano_loop.steps.step.Step.skip_reason`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import torch

from nano_loop.config.options import Options
from nano_loop.cpu import format_cpu_list
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.kernels.build import summary
from nano_loop.runtime.objects.report import ReportPrinter, SetupReport, StepResult
from nano_loop.steps.step import Step
from nano_loop.version import __version__

#: The command that finds the value of ``num_processes="auto"``.
_MEASURE = "nano-loop tune --num-processes auto --split-batches SCRIPT"
#: The kind of object that was not set up, by `Step.needs`.
_PARTS = {"models": "model", "optimizers": "optimizer", "trained": "model", "loaders": "DataLoader", None: "model"}
_MUCH = 100 << 20  # the report lists copies of arguments from this number of bytes on


class RunReport:
    """The report of a run and its nested runs, which rank 0 prints, except for lines that the previous run printed."""

    def __init__(self, options: Options, printed: list[str]) -> None:
        self.report: SetupReport | None = None  # None until something is added
        self._options = options
        self._printer = ReportPrinter(printed)
        #: Options that did not apply in any nested run that has ended, by name; None if no nested run has ended.
        self.unmet: dict[str, tuple[str, str, str]] | None = None
        self._final: set[tuple[str, str, str | None]] = set()  # names, statuses and codes

    def add(self, slot: RankSlot, results: list[StepResult]) -> None:
        """Add results, and print new ones, with steps that have nothing to do in one line at the end."""
        results = sorted(results, key=lambda result: bool(result.idle))
        new: Sequence[SetupReport | StepResult]
        if self.report is None:
            self.report = _empty_report(slot, self._options)
            self.report.add(results)
            new = [self.report]
        else:
            new = self.report.add(results)
        if new and self._options.verbose and slot.ranks.rank == 0:
            self._printer.print(new)

    def add_final(self, slot: RankSlot, results: list[StepResult]) -> None:
        """Add the final results of a run. Of nested runs, which may be many, add only the first of each kind."""
        kinds = [(result.name, result.status, result.code) for result in results]
        self.add(slot, [result for result, kind in zip(results, kinds, strict=True) if kind not in self._final])
        self._final.update(kinds)

    def note_unmet(self, steps: Iterable[Step]) -> None:
        """Record the options set to True that did not apply to anything in a nested run with these steps."""
        unmet = self.unmet_of(steps)
        self.unmet = {entry[0]: entry for entry in unmet if self.unmet is None or entry[0] in self.unmet}

    def unmet_of(self, steps: Iterable[Step], *, are_errors: bool = False) -> Iterator[tuple[str, str, str]]:
        """Yield steps set to True that apply to no set-up object, with reasons, harmless ones unless `are_errors`."""
        results = [] if self.report is None else self.report.results
        in_use = {result.name for result in results if result.status != "skipped"}
        reasons = {result.name: result.detail for result in results}
        codes = {result.name: result.code for result in results}
        for step in steps:
            is_harmless = are_errors and codes.get(step.name) in step.harmless
            if is_harmless or not step.options.is_asked_for(step.name):
                continue
            reason, missing = step.unused_because or reasons.get(step.name), _PARTS[step.needs]
            if reason is not None and (step.unused_because or step.name not in in_use):
                yield step.name, reason, f"Remove {step.name}"
            elif step.name not in in_use:
                yield step.name, f"no {missing} was set up", f"Pass the {missing}, or remove {step.name}"


def _empty_report(slot: RankSlot, options: Options) -> SetupReport:
    """Return a report for the run of `slot`, with the results known before it starts."""
    learnt = []
    if options.learnt:
        detail = f"{', '.join(options.learnt.values())}, found by nano-loop tune"
        learnt = [StepResult("tune", "applied", detail)]
    elif options.num_processes == "auto" and slot.ranks.size == 1:
        detail = f"one process; to find the fastest number, run {_MEASURE}"
        learnt = [StepResult("tune", "skipped", detail, code="not_measured")]
    return SetupReport(
        title=_title(slot),
        machine=slot.machine.as_dict(),
        options=json.loads(json.dumps(options.as_dict(), default=repr)),
        from_environment=options.from_environment,
        results=learnt,
    )


def _title(slot: RankSlot) -> str:
    machine, ranks = slot.host, slot.ranks
    quota = "" if machine.quota is None else f" (quota {machine.quota:g})"
    used = ", ".join(format_cpu_list(cpus) for cpus in ranks.shares or [machine.allowed])
    threads = torch.get_num_threads()
    hosts = "" if ranks.on_one_host else f", {ranks.local_size} on this host"
    bf16 = (name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in machine.instruction_sets)
    parts = [
        f"nano_loop {__version__}",
        f"{ranks.size} process{'es' if ranks.size > 1 else ''}{hosts} × {threads} thread{'s' if threads > 1 else ''}",
        f"CPUs {used} of {len(machine.logical_cpus)}{quota}",
        ", ".join([machine.name, *bf16]),
        summary(),
        *([f"{slot.copied / (1 << 30):.1f} GiB of arguments copied"] if slot.copied >= _MUCH else []),
    ]
    return " · ".join(parts)
