"""Compare precision="auto" with 32 in the first steps of small models, including all measurements.

python -m benchmarks.first_steps
python -m benchmarks.first_steps --only lstm_forecast,gnn --steps 300 --rounds 3

Each run is a fresh process. The first run in "auto" starts with an empty cache folder, and the second one with what the
first has saved. With one thread, the time is CPU time, which is least affected by other programs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from tqdm import tqdm

import nano_loop
from benchmarks.fresh import ROOT
from benchmarks.loop import steps
from benchmarks.markdown import table
from benchmarks.names import at_least_one, find, names
from benchmarks.workloads import ALL, LISTS

#: Eleven models of the users' suite.
MODELS = (
    *("tabular", "wide", "policy", "gru_forecast", "lstm_forecast", "tcn_forecast", "transformer_forecast"),
    *("autoencoder", "lenet", "gnn", "text_cnn"),
)
RUNS = {"32": 32, '"auto"': "auto", '"auto", second run': "auto"}


def train(workload: str, precision: str, count: int, threads: int, small: bool) -> float:
    """Return the seconds of the first steps of a run."""
    torch.manual_seed(0)
    work = find(workload, ALL)(small)
    clock = time.process_time if threads == 1 else time.perf_counter
    options = {"precision": int(precision) if precision.isdigit() else precision, "num_threads": threads}
    run = nano_loop.nano(verbose=False, **options)(steps)
    run(work.model, work.optimizer, work.batches, work.loss, 1)  # imports, page faults and kernels of oneDNN
    began = clock()
    run(work.model, work.optimizer, work.batches, work.loss, count)
    return clock() - began


def rounds(workload: str, count: int, threads: int, number: int, small: bool) -> list[list[float]]:
    """Return the seconds of each run, for each round."""
    found = []
    for place in tqdm(range(number), desc=workload, file=sys.stderr, leave=False):
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            caches = dict(zip(RUNS, (first, second, second), strict=True))
            order = [*RUNS][place % 2 :] + [*RUNS][: place % 2]  # the second run in "auto" follows the first
            seconds = {name: _fresh(workload, str(RUNS[name]), count, threads, small, caches[name]) for name in order}
        found.append([seconds[name] for name in RUNS])
    return found


def _fresh(workload: str, precision: str, count: int, threads: int, small: bool, cache: str) -> float:
    command = [sys.executable, "-m", "benchmarks.first_steps", "--only", workload, "--one", precision]
    command += ["--steps", str(count), "--threads", str(threads), *["--small"] * small]
    environ = {**os.environ, "XDG_CACHE_HOME": cache}
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def row(workload: str, found: Sequence[Sequence[float]], count: int) -> tuple[list[str], list[float]]:
    """Return a row of the table, and the ratios of both runs in "auto"."""
    cells, ratios = [workload, f"{statistics.median(seconds[0] for seconds in found) / count * 1e3:.3g}"], []
    for place in (1, 2):
        each = sorted(seconds[0] / seconds[place] for seconds in found)
        ratios.append(statistics.median(each))
        cells.append(f"{ratios[-1]:.2f} ({each[0]:.2f} to {each[-1]:.2f})")
    return cells, ratios


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.first_steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=names(ALL, LISTS), default=[*MODELS], metavar="WORKLOADS")
    parser.add_argument("--steps", type=at_least_one, default=300)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--threads", type=at_least_one, default=1)
    parser.add_argument("--small", action="store_true", help="small workloads: only to see that everything runs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.one:
        print(train(options.only[0], options.one, options.steps, options.threads, options.small))
        return
    lines, ratios = [], []
    for workload in options.only:
        found = rounds(workload, options.steps, options.threads, options.rounds, options.small)
        cells, both = row(workload, found, options.steps)
        lines.append(cells)
        ratios.append(both)
    least = [f"{min(each):.2f}" for each in zip(*ratios, strict=True)]
    head = ["model", "32, ms per step", '"auto" over 32', "second run"]
    print(table(head, [*lines, ["**the least**", "", *least]]))


if __name__ == "__main__":
    main()
