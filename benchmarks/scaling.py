"""Measures how nano_loop's speed grows with cores: one process of more threads, and more processes of one thread.

One core is where both begin. With t threads one process trains on the workload's batches; p processes train on p such
batches at a time, as a loader's users have it. So the speed is batches per second over those of one core, and the
efficiency is that over the number of cores.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.fresh import Result
from benchmarks.rounds import take_turns
from nano_loop.cpu import read_machine

ONE_CORE = "1 thread"


def counts(cores: int) -> list[int]:
    """Return the powers of two up to the number of cores, and that number."""
    powers = [2**exponent for exponent in range(cores.bit_length())]
    return sorted({*powers, cores})


def scaling(workload: str, rounds: int, small: bool, limit: float) -> dict[str, dict[str, Any]]:
    """Return by ``2 threads`` or ``2 processes`` the median ms per step, the speed-up and the efficiency."""
    cases = _jobs(workload, small)
    jobs = {
        name: {"job": job, "settings": {"OMP_NUM_THREADS": str(threads)}} for name, (_, threads, job) in cases.items()
    }
    found = take_turns(jobs, rounds, limit, workload)
    return {name: _row(found, name, cores) for name, (cores, _, _) in cases.items()}


def _jobs(workload: str, small: bool) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """Return by name the cores, the threads of each process, and the job."""
    machine = read_machine()
    cpus = [core[0] for core in machine.physical_cores]
    several = counts(machine.num_threads)
    work = {"workload": workload, "small": small}
    threads = {_name(n, "thread"): (n, n, {"task": "steps", "system": "nano", **work}) for n in several}
    return threads | {
        _name(n, "process"): (n, 1, {"task": "ranks", "cpus": cpus[:n], **work}) for n in several if n > 1
    }


def _name(count: int, unit: str) -> str:
    return f"{count} {unit}{'' if count == 1 else 'es' if unit == 'process' else 's'}"


def _row(rounds: list[dict[str, Result]], name: str, cores: int) -> dict[str, Any]:
    """Return the figures of one line; None in each place, and the reason, where it or one core was not measured."""
    reason = next((each[key]["reason"] for each in rounds for key in (name, ONE_CORE) if "reason" in each[key]), None)
    batches = cores if "process" in name else 1
    speed_ups = [] if reason else [batches * each[ONE_CORE]["median_ms"] / each[name]["median_ms"] for each in rounds]
    return {
        "cores": cores,
        "median_ms": None if reason else statistics.median(each[name]["median_ms"] for each in rounds),
        "speed_up": statistics.median(speed_ups) if speed_ups else None,
        "speed_up_range": [min(speed_ups), max(speed_ups)] if speed_ups else None,
        "efficiency": statistics.median(speed_ups) / cores if speed_ups else None,
        "reason": reason,
        "rounds": [each[name] for each in rounds],
    }


def scaling_table(workload: str, rows: dict[str, dict[str, Any]]) -> str:
    """Return it as a table for the terminal."""
    lines = [
        f"\n{workload}, nano",
        f"  {'':<14}{'ms per step':>11}{'batches/s over one core':>27}{'efficiency':>12}",
    ]
    for name, row in rows.items():
        if row["reason"]:
            lines.append(f"  {name:<14}{'–':>11}  {row['reason']}")
            continue
        low, high = row["speed_up_range"]
        speed = f"{row['speed_up']:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"  {name:<14}{row['median_ms']:>11.2f}{speed:>27}{row['efficiency']:>12.0%}")
    return "\n".join(lines)
