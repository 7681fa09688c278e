"""Runs workloads × systems, each case in a process of its own and the systems in turn, and shows and stores figures.

python -m benchmarks.run
python -m benchmarks.run --only bert,mlp --systems plain,nano --rounds 5 --output bert-and-mlp
python -m benchmarks.run --quick
python -m benchmarks.run --scaling bert
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.forks import forks
from benchmarks.fresh import ROOT, fresh
from benchmarks.names import at_least_one, names
from benchmarks.rounds import Plan, measure
from benchmarks.scaling import scaling, scaling_table
from benchmarks.summary import geometric_means, set_matmul_shares, summarize
from benchmarks.surroundings import heading, surroundings
from benchmarks.systems import SYSTEMS
from benchmarks.table import means, table
from benchmarks.workloads import WORKLOADS

RESULTS = ROOT / "benchmarks/results"
ROUNDS, QUICK_ROUNDS = 3, 1


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", type=names(WORKLOADS), default=list(WORKLOADS), metavar="WORKLOADS", help="names between commas")
    add("--systems", type=names(SYSTEMS), default=list(SYSTEMS), metavar="SYSTEMS", help="names between commas")
    add("--rounds", type=at_least_one, help=f"default: {ROUNDS}, with --quick {QUICK_ROUNDS}")
    add("--quick", action="store_true", help="small workloads, in forks of one process: under four minutes")
    add("--scaling", type=names(WORKLOADS), metavar="WORKLOAD", help="instead: nano on 1, 2, … threads and processes")
    add("--output", metavar="NAME", help=f"keep NAME.json and NAME.png in {RESULTS.relative_to(ROOT)}, or at a path")
    add("--limit", type=at_least_one, default=900, metavar="SECONDS", help="give a case up after (default: 900)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a case in progress is ended too
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    results = surroundings()
    print(heading(results))
    with ExitStack() as stack:
        if options.scaling:
            _scale(options, results)
        else:
            _compare(options, results, stack.enter_context(forks()) if options.quick else fresh)


def _scale(options: argparse.Namespace, results: dict[str, Any]) -> None:
    output = _output(options.output or "scaling")
    results["scaling"] = {}
    for workload in options.scaling:
        found = scaling(workload, options.rounds, options.quick, options.limit)
        results["scaling"][workload] = found
        print(scaling_table(workload, found))
        _store(results, output)


def _compare(options: argparse.Namespace, results: dict[str, Any], run: Any) -> None:
    """Show and store each workload when it is measured, so that nothing is lost of a run that is broken off."""
    output = _output(options.output or "latest")
    plan = Plan(options.only, options.systems, options.rounds, options.quick, options.limit, run)
    results |= {"rounds": plan.rounds, "quick": plan.quick, "workloads": {}}
    for measured in measure(plan):
        results["workloads"][measured.workload] = summary = summarize(measured)
        set_matmul_shares(results["workloads"])
        results["geometric_means"] = geometric_means(results["workloads"])
        tqdm.write(table(measured.workload, summary))
        _store(results, output)
    print(f"\n{means(results['geometric_means'])}\n")
    _draw(results, output)


def _output(name: str) -> Path:
    """Return where to store results, less the suffix."""
    output = Path(name) if "/" in name else RESULTS / name
    output.parent.mkdir(parents=True, exist_ok=True)
    return output


def _store(results: dict[str, Any], output: Path) -> None:
    output.with_name(f"{output.name}.json").write_text(json.dumps(results, indent=1) + "\n")


def _draw(results: dict[str, Any], output: Path) -> None:
    try:
        from benchmarks.chart import draw

        draw(results, output.with_name(f"{output.name}.png"))
    except ModuleNotFoundError as error:
        print(f"no chart: {error} (pip install -r requirements/bench.txt)", file=sys.stderr)


if __name__ == "__main__":
    main()
