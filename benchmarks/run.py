"""Runs workloads × systems, each case in a fresh process and the systems in turn, and prints medians and ratios.

python -m benchmarks.run
python -m benchmarks.run --only resnet50 --systems plain,nano --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS
from nano_loop.cpu import read_machine

ROOT = Path(__file__).resolve().parent.parent
#: Steps of a case: enough for a median, few enough that a round of all systems fits into minutes of noise.
STEPS = {"mlp": 1000}


def names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = set(chosen) - set(known)
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
        return chosen

    return parse


def measure(workload: str, system: str, steps: int) -> dict[str, float]:
    """Run one case in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.case", workload, system, "--steps", str(steps)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def show(workload: str, rounds: list[dict[str, dict[str, float]]], systems: list[str]) -> None:
    """Print a row a system: its time, its memory, and how many times faster than each other system nano is."""
    print(f"\n{workload}")
    print(f"  {'system':<10} {'ms a step':>10} {'peak MB':>8}   nano is faster by, round by round: median (range)")
    for system in systems:
        times = [each[system]["median_ms"] for each in rounds]
        memory = max(each[system]["peak_rss_mb"] for each in rounds)
        row = f"  {system:<10} {statistics.median(times):>10.2f} {memory:>8.0f}"
        if "nano" in systems and system != "nano":
            ratios = [each[system]["median_ms"] / each["nano"]["median_ms"] for each in rounds]
            row += f"   {statistics.median(ratios):.2f}× ({min(ratios):.2f}-{max(ratios):.2f})"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=names(WORKLOADS), default=list(WORKLOADS), metavar="WORKLOADS")
    parser.add_argument("--systems", type=names(SYSTEMS), default=list(SYSTEMS), metavar="SYSTEMS")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    machine = read_machine()
    bf16 = "with" if machine.has_fast_bf16 else "without"
    print(f"{machine.name}, {machine.num_threads} cores, {bf16} bf16 instructions, torch {torch.__version__}")
    for workload in arguments.only:
        rounds = []
        for number in range(arguments.rounds):
            print(f"{workload}: round {number + 1} of {arguments.rounds}", file=sys.stderr)
            rounds.append({system: measure(workload, system, STEPS.get(workload, 6)) for system in arguments.systems})
        show(workload, rounds, arguments.systems)


if __name__ == "__main__":
    main()
