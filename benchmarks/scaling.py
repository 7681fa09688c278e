"""Measure how nano_loop's speed grows with cores: one process with more threads, and more processes.

python -m benchmarks.run --scaling bert,mlp
python -m benchmarks.scaling --split bert,resnet50,vit,lstm
python -m benchmarks.scaling --computed bert,resnet50,vit,lstm --samples 16

Both start with one core. With t threads, one process trains on the workload's batches; p processes train on p such
batches at a time, like divided loaders. So the speed is batches per second relative to one core, and the efficiency
is the speed divided by the number of cores.

With `--split`, processes share each batch, and together use all cores: the same training with other numbers of
processes, as `nano-loop tune --num-processes auto --split-batches` tries them. `--computed` estimates steps for more
cores than the machine has: see `benchmarks.shares`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fresh import Result
from benchmarks.names import at_least_one, names
from benchmarks.rounds import take_turns
from benchmarks.shares import computed, computed_table
from benchmarks.surroundings import heading, surroundings
from benchmarks.workloads import ALL, LISTS
from nano_loop.cpu import process_counts, read_machine

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
    """Return the figures of one line; None and the reason if it or one core was not measured."""
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


def split(
    workload: str, small: bool, limit: float, samples: int, rounds: int, processes: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Return, by number of processes, the median ms per step, and the speed relative to one process, by round."""
    work = {"task": "split", "workload": workload, "small": small, "samples": samples}
    jobs = {str(count): {"job": {**work, "processes": count}} for count in dict.fromkeys([1, *processes])}
    found = take_turns(jobs, rounds, limit, workload)
    return {name: _over_one_process(found, name) for name in jobs}


def _over_one_process(rounds: list[dict[str, Result]], name: str) -> dict[str, Any]:
    reason = next((each[key]["reason"] for each in rounds for key in (name, "1") if "reason" in each[key]), None)
    speed_ups = [] if reason else [each["1"]["median_ms"] / each[name]["median_ms"] for each in rounds]
    return {
        "reason": reason,
        "median_ms": None if reason else statistics.median(each[name]["median_ms"] for each in rounds),
        "speed_up": statistics.median(speed_ups) if speed_ups else None,
        "speed_up_range": [min(speed_ups), max(speed_ups)] if speed_ups else None,
        "rounds": [each[name] for each in rounds],
    }


def split_table(workload: str, rows: dict[str, dict[str, Any]]) -> str:
    """Return it as a table for the terminal."""
    lines = [f"\n{workload}, split batches", f"  {'processes':<12}{'ms per step':>11}{'over one process':>27}"]
    for name, row in rows.items():
        if row["reason"]:
            lines.append(f"  {name:<12}{'–':>11}  {row['reason']}")
            continue
        low, high = row["speed_up_range"]
        speed = f"{row['speed_up']:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"  {name:<12}{row['median_ms']:>11.1f}{speed:>27}")
    return "\n".join(lines)


def best_of(found: dict[str, dict[str, dict[str, Any]]]) -> float | None:
    """Return the geometric mean, over the workloads, of the best number of processes over one process."""
    best = [max((row["speed_up"] or 0.0 for row in rows.values()), default=0.0) for rows in found.values()]
    return math.exp(statistics.fmean(map(math.log, best))) if best and min(best) > 0 else None


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--split", type=names(ALL, LISTS), default=[], metavar="WORKLOADS", help="processes that share each batch")
    add("--computed", type=names(ALL, LISTS), default=[], metavar="WORKLOADS", help="from what one core takes")
    add("--processes", type=_numbers, metavar="N,...", help="default: those that tune tries on this machine")
    add("--samples", type=at_least_one, default=32, help="of a batch (default: 32)")
    add("--rounds", type=at_least_one, default=1, help="of --split (default: 1)")
    add("--ring", type=float, default=1.3, help="averaging over its bytes at the memory's rate (default: 1.3)")
    add("--memory", type=float, default=200.0, help="GB/s that the memory of all cores moves (default: 200)")
    add("--minutes", type=float, default=9.5, help="of --split: later workloads are omitted (default: 9.5)")
    add("--limit", type=at_least_one, default=300, metavar="SECONDS", help="give a case up after (default: 300)")
    add("--quick", action="store_true", help="small workloads, which only show that it runs")
    add("--output", type=Path, metavar="FILE", help="store the results as JSON")
    options = parser.parse_args(given)
    if bool(options.split) == bool(options.computed):
        parser.error("give --split or --computed, with workloads")
    return options


def _numbers(text: str) -> list[int]:
    return [at_least_one(each) for each in text.split(",")]


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    results, began = surroundings(), time.monotonic()
    kind = "split" if options.split else "computed"
    results |= {"quick": options.quick, "samples": options.samples, kind: {}}
    if options.computed:
        results |= {"ring": options.ring, "memory": options.memory}
    print(heading(results))
    for workload in getattr(options, kind):
        left = options.minutes * 60 - (time.monotonic() - began)
        if options.split and left <= 0:
            print(f"\n{workload}: no time is left")
            continue
        if options.split:
            processes = options.processes or process_counts(read_machine())
            limit = min(options.limit, left)
            found = split(workload, options.quick, limit, options.samples, options.rounds, processes)
        else:
            found = computed(workload, options.quick, options.limit, options.samples, options.ring, options.memory)
        results[kind][workload] = found
        print(split_table(workload, found) if options.split else computed_table(workload, found), flush=True)
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.split and (mean := best_of(results[kind])) is not None:
        print(f"\nbest number of processes over one process, geometric mean: {mean:.2f}")


if __name__ == "__main__":
    main()
