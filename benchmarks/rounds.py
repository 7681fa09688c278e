"""Measure workloads × systems in rounds, with alternating systems."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from benchmarks.fresh import Result, fresh
from benchmarks.systems import python_of, settings_of, why_not

Run = Callable[..., Result]

NO_SETTINGS: Mapping[str, str] = {}


@dataclass
class Measured:
    """The measurements of one workload.

    Parameters
    ----------
    workload : str
        Its name.
    flops : dict
        The matrix ``flops`` of a step, or the reason why they are not known.
    rounds : list of dict
        For each round, the result of each system's case, by name.
    matmul : list of dict
        For each round the machine's GFLOP/s, by dtype.
    """

    workload: str
    flops: Result
    rounds: list[dict[str, Result]] = field(default_factory=list)
    matmul: list[Result] = field(default_factory=list)


@dataclass
class Plan:
    """The plan of a run.

    Parameters
    ----------
    workloads, systems : list of str
        Their names.
    rounds : int
        How many rounds.
    small : bool
        Whether workloads are small.
    limit : float
        Time limit of a case in seconds.
    run : callable
        `fresh`, or what `forks` gives.
    left_out : mapping
        By system, the reason why it is not measured.
    """

    workloads: list[str]
    systems: list[str]
    rounds: int
    small: bool
    limit: float
    run: Run = fresh
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        measured = [system for system in self.systems if not self.why_not(system)]
        return len(self.workloads) * (1 + self.rounds * (1 + len(measured)))

    def why_not(self, system: str) -> str | None:
        """Return why a system is not measured, or None."""
        return self.left_out.get(system) or why_not(system)


def measure(plan: Plan) -> Iterator[Measured]:
    """Yield each workload when it is measured, and show the progress on standard error."""
    tqdm.monitor_interval = 0  # no monitor thread
    with tqdm(total=len(plan), file=sys.stderr, unit="case", dynamic_ncols=True) as bar:
        for workload in plan.workloads:
            yield _measure(plan, workload, bar)


def _measure(plan: Plan, workload: str, bar: tqdm[Any]) -> Measured:
    bar.set_description(f"{workload} FLOPs")
    flops = _job(plan, bar, task="flops", workload=workload)
    found = Measured(workload, flops)
    broken: dict[str, Result] = {}
    for number in range(plan.rounds):
        bar.set_description(f"{workload} round {number + 1} matmul")
        found.matmul.append(_job(plan, bar, task="matmul"))
        results = {}
        for system in in_turn(plan.systems, number):
            bar.set_description(f"{workload} round {number + 1} {system}")
            results[system] = broken.get(system) or _case(plan, bar, workload, system)
            if "reason" in results[system]:
                broken[system] = results[system]
        found.rounds.append({system: results[system] for system in plan.systems})
    return found


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Start each round with another name, since the state of the machine may differ between the first and the last.

    Every second round is reversed, so that a name does not always follow the same one.
    """
    start = number % len(names)
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if number % 2 else turned


def take_turns(jobs: Mapping[str, dict[str, Any]], rounds: int, limit: float, title: str) -> list[dict[str, Result]]:
    """Return, for each round, the measurement of each job in its own process; `jobs` are `fresh`'s jobs, by name."""
    found: list[dict[str, Result]] = []
    with tqdm(total=rounds * len(jobs), file=sys.stderr, unit="case", dynamic_ncols=True) as bar:
        for number in range(rounds):
            results = {}
            for name in in_turn(list(jobs), number):
                bar.set_description(f"{title} {name}")
                results[name] = fresh(**jobs[name], limit=limit)
                bar.update()
            found.append(results)
    return found


def _case(plan: Plan, bar: tqdm[Any], workload: str, system: str) -> Result:
    reason = plan.why_not(system)
    if reason:
        return {"reason": reason}
    place = python_of(system), settings_of(system)
    return _job(plan, bar, *place, task="steps", workload=workload, system=system)


def _job(
    plan: Plan, bar: tqdm[Any], python: str = sys.executable, settings: Mapping[str, str] = NO_SETTINGS, **job: Any
) -> Result:
    job |= {"small": plan.small}
    if python == sys.executable and not settings:
        result = plan.run(job, limit=plan.limit)
    else:  # not a fork of this process
        result = fresh(job, limit=plan.limit, python=python, settings=settings)
    bar.update()
    return result
