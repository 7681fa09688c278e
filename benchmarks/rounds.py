"""Measures workloads × systems in rounds, in each of which the systems take turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from benchmarks.fresh import Result, fresh
from benchmarks.systems import python_of, why_not

Run = Callable[..., Result]


@dataclass
class Measured:
    """What was measured of one workload.

    Parameters
    ----------
    workload : str
        Its name.
    flops : dict
        The matrix ``flops`` of a step, or the reason why they are not known.
    rounds : list of dict
        For each round what each system's case returned, by its name.
    matmul : list of dict
        For each round the machine's GFLOP/s, by dtype.
    """

    workload: str
    flops: Result
    rounds: list[dict[str, Result]] = field(default_factory=list)
    matmul: list[Result] = field(default_factory=list)


@dataclass
class Plan:
    """What to measure, and how.

    Parameters
    ----------
    workloads, systems : list of str
        Their names.
    rounds : int
        How many rounds.
    quick : bool
        Whether workloads are small, and systems that take long are left out.
    limit : float
        Seconds after which a case is given up.
    run : callable
        `fresh`, or what `forks` gives.
    """

    workloads: list[str]
    systems: list[str]
    rounds: int
    quick: bool
    limit: float
    run: Run = fresh

    def __len__(self) -> int:
        measured = [system for system in self.systems if not why_not(system, self.quick)]
        return len(self.workloads) * (1 + self.rounds * (1 + len(measured)))


def measure(plan: Plan) -> Iterator[Measured]:
    """Yield each workload when it is measured, and show how far it has come on standard error."""
    tqdm.monitor_interval = 0  # no thread of its own
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
        for system in _in_turn(plan.systems, number):
            bar.set_description(f"{workload} round {number + 1} {system}")
            results[system] = broken.get(system) or _case(plan, bar, workload, system)
            if "reason" in results[system]:
                broken[system] = results[system]
        found.rounds.append({system: results[system] for system in plan.systems})
    return found


def _in_turn(systems: Sequence[str], number: int) -> list[str]:
    """Let each round begin with another system, for the first may find the machine other than the last does."""
    start = number % len(systems)
    return [*systems[start:], *systems[:start]]


def _case(plan: Plan, bar: tqdm[Any], workload: str, system: str) -> Result:
    reason = why_not(system, plan.quick)
    if reason:
        return {"reason": reason}
    other = {} if python_of(system) == sys.executable else {"python": python_of(system)}
    return _job(plan, bar, other, task="steps", workload=workload, system=system)


def _job(plan: Plan, bar: tqdm[Any], other: dict[str, str] | None = None, **job: Any) -> Result:
    result = plan.run({**job, "small": plan.quick}, limit=plan.limit, **(other or {}))
    bar.update()
    return result
