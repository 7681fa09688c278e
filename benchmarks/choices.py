"""Compares the options that `nano-loop tune` chooses with the fastest of a full measurement.

python -m benchmarks.choices
python -m benchmarks.choices --only bert,mlp --small --seconds 10

The full measurement is every combination of precision, layout and number of threads. Each takes steps in turn with the
options that were chosen, as in `benchmarks.lockstep`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch

from benchmarks import systems
from benchmarks.fresh import ROOT, environment
from benchmarks.lockstep import FOREVER, Live, compare
from benchmarks.names import find, names
from benchmarks.workloads import ALL, LISTS, Workload
from nano_loop.search.result import Tuning


def grid(images: bool, threads: int) -> Iterator[dict[str, Any]]:
    """Yield the combinations of options."""
    layouts = [False, True] if images else [False]
    for precision, channels_last, count in product([32, "bf16"], layouts, dict.fromkeys([threads, 1])):
        yield {"precision": precision, "channels_last": channels_last, "num_threads": count}


def built(workload: str, small: bool) -> Workload:
    """Return a workload as the processes that are compared build it."""
    torch.manual_seed(0)
    work: Workload = find(workload, ALL)(small)
    work.model.train()
    return work


def searched(workload: str, small: bool) -> dict[str, Any]:
    """Return the result of `nano-loop tune` for the loop that is compared; its table goes to standard error."""
    script = ["-m", "benchmarks.choices", "--loop", workload, *["--small"] * small]
    command = [sys.executable, "-m", "nano_loop", "tune", "--json", "--again", "--num-processes", "1", *script]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the search for {workload} failed")
    result: dict[str, Any] = json.loads(done.stdout)
    content = {key: value for key, value in result.items() if key not in ("version", "command")}
    print(Tuning.of_dict(content), file=sys.stderr)
    return result


def row(workload: str, small: bool, seconds: float) -> str:
    """Return a workload's row of the table."""
    found = searched(workload, small)
    chosen = found["options"]
    ratios = {}
    for options in grid(built(workload, small).images, torch.get_num_threads()):
        with ExitStack() as stack:
            pair = []
            for each in (options, chosen):
                pair.append(Live(workload, json.dumps(each), small, ROOT))
                stack.callback(pair[-1].end)
            of_grid, of_chosen = compare(*pair, seconds)
        ratios[json.dumps(options)] = statistics.median(a / b for a, b in zip(of_grid, of_chosen, strict=True))
        print(f"  {ratios[json.dumps(options)]:.3f} {options}", file=sys.stderr, flush=True)
    best = min(ratios, key=lambda each: ratios[each])
    return f"| {workload} | `{json.dumps(chosen)}` | {found['seconds']:.0f} | `{best}` | {ratios[best]:.3f} |"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.choices", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", type=names(ALL, LISTS), default=["resnet18_folder", "bert", "mlp"], metavar="WORKLOADS")
    add("--small", action="store_true", help="small workloads")
    add("--seconds", type=float, default=10, help="of a comparison (default: 10)")
    add("--loop", metavar="WORKLOAD", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.loop:
        systems.nano_with(built(options.loop, options.small), FOREVER)
        return
    print("| workload | chosen | search, s | fastest of the grid | speed of the choice over that |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for workload in options.only:
        print(row(workload, options.small, options.seconds), flush=True)


if __name__ == "__main__":
    main()
