"""Compare systems, or two checkouts of nano_loop, step by step: live processes take steps in turn.

python -m benchmarks.lockstep --only mlp,bert --systems plain,nano
python -m benchmarks.lockstep --only mlp --against ../another-checkout --small
python -m benchmarks.lockstep --only benchmarks.workloads.images:dcgan --systems plain,nano --busy 1

Each round of a few hundred milliseconds yields a ratio, so other programs slow down both sides. On a machine on which
medians of fresh processes differ by 30%, the medians of these ratios differ by 1 or 2%. Effects that are constant
within a process, such as the placement of its memory, show as differences between restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import systems
from benchmarks.fresh import ROOT
from benchmarks.names import at_least_one, find, names
from benchmarks.workloads import ALL, LISTS

WARMUP = 4  # rounds
ROUND = 0.15  # minimum seconds of a side's steps in one round
BUSY = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"
FOREVER = 1 << 40


class Live:
    """A process that trains a workload under a system, or with options in JSON, and takes steps when it is asked to."""

    def __init__(self, workload: str, system: str, small: bool, checkout: Path) -> None:
        python, module = systems.python_of(system), str(Path(__file__).resolve())
        command = [python, module, "--live", workload, system, *["small"] * small]
        self._process = subprocess.Popen(
            command,
            cwd=checkout,
            env={**os.environ, **systems.settings_of(system), "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def take(self, count: int) -> float:
        """Take steps, and return the seconds of one."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return self._read() / count

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self._process.args))} ended")
        return float(line)


def live(workload: str, system: str, small: bool) -> None:
    """Run as such a process: the loss, which a step calls once, waits for the next request."""
    torch.manual_seed(0)
    work = find(workload, ALL)(small)
    work.model.train()
    original, out, sys.stdout = work.loss, sys.stdout, sys.stderr
    left, start = 0, time.perf_counter()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal left, start
        while not left:
            print(time.perf_counter() - start, file=out, flush=True)
            left = int(sys.stdin.readline() or os._exit(0))
            start = time.perf_counter()
        left -= 1
        return original(model, batch)

    work.loss = loss
    if system.startswith("{"):
        systems.nano_with(work, FOREVER, **json.loads(system))
    else:
        find(system, systems.SYSTEMS)(work, FOREVER)


def compare(first: Live, second: Live, seconds: float) -> tuple[list[float], list[float]]:
    """Run steps of both in turn, and return the seconds per step of each, round by round."""
    for _ in range(WARMUP):
        slower = max(first.take(1), second.take(1))
    count = max(1, round(ROUND / slower))
    pairs: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while not pairs or time.monotonic() < end:
        if len(pairs) % 2:
            late = second.take(count)
            pairs.append((first.take(count), late))
        else:
            pairs.append((first.take(count), second.take(count)))
    return [each for each, _ in pairs], [each for _, each in pairs]


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep the first of these cores busy with other programs."""
    with ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0))[:cores]:
            process = subprocess.Popen([sys.executable, "-c", BUSY % core])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def row(workload: str, sides: list[tuple[str, Path]], options: argparse.Namespace) -> str:
    """Return a workload's row of the table."""
    medians: list[list[float]] = [[], []]
    ratios = []
    for _ in range(options.restarts):
        with ExitStack() as stack:
            pair = []
            for system, checkout in sides:
                pair.append(Live(workload, system, options.small, checkout))
                stack.callback(pair[-1].end)
            found = compare(*pair, options.seconds)
        for own, each in zip(medians, found, strict=True):
            own.append(statistics.median(each))
        ratios.append(statistics.median(a / b for a, b in zip(*found, strict=True)))
    first, second = (f"{statistics.median(each) * 1e3:.3g}" for each in medians)
    of_each = ", ".join(f"{each:.3f}" for each in ratios)
    return f"| {workload} | {first} | {second} | {statistics.median(ratios):.3f} ({of_each}) |"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.lockstep", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", type=names(ALL, LISTS), default=["mlp", "lstm", "unet"], metavar="WORKLOADS")
    add("--systems", type=names(systems.SYSTEMS), default=["plain", "nano"], help="two; the second is compared")
    add("--against", type=Path, metavar="CHECKOUT", help="the second system in that checkout and in this one")
    add("--small", action="store_true", help="small workloads")
    add("--seconds", type=float, default=20, help="of a restart (default: 20)")
    add("--restarts", type=at_least_one, default=3, help="of both processes (default: 3)")
    add("--busy", type=int, default=0, metavar="CORES", help="that other programs keep busy")
    options = parser.parse_args(given)
    if len(options.systems) != 2:
        parser.error("--systems takes two")
    for each in options.systems:
        if reason := systems.why_not(each):
            parser.error(f"--systems {each}: {reason}")
    here = ROOT.resolve()
    sides = [(options.systems[1], each) for each in (options.against.resolve(), here)] if options.against else None
    sides = sides or [(each, here) for each in options.systems]
    first, second = ("that checkout", "this one") if options.against else options.systems
    print(f"| workload | {first}, ms | {second}, ms | speed of the second (by restart) |")
    print("| --- | --- | --- | --- |", flush=True)
    with busy(options.busy):
        for workload in options.only:
            print(row(workload, sides, options), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--live"]:
        live(sys.argv[2], sys.argv[3], sys.argv[4:] == ["small"])
    else:
        main()
