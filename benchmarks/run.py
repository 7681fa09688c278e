"""Run workloads × systems, each case in a fresh process and the systems in turn, and show and store the figures.

python -m benchmarks.run
python -m benchmarks.run --only bert,mlp --systems plain,nano --rounds 5 --output bert-and-mlp
python -m benchmarks.run --suite users --output users
python -m benchmarks.run --quick
python -m benchmarks.run --quick --only mlp --systems compile,nano
python -m benchmarks.run --scaling bert,mlp
python -m benchmarks.run --levers bert,resnet50
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.forks import forks
from benchmarks.fresh import ROOT, fresh
from benchmarks.levers import levers, levers_table
from benchmarks.names import at_least_one, names
from benchmarks.rounds import Plan, measure
from benchmarks.scaling import scaling, scaling_table
from benchmarks.summary import geometric_means, set_matmul_shares, summarize
from benchmarks.surroundings import heading, surroundings
from benchmarks.systems import DEFAULT, NOT_QUICK, OF_USERS, SYSTEMS
from benchmarks.table import means, table
from benchmarks.workloads import ALL, LISTS, USERS, WORKLOADS

RESULTS = ROOT / "benchmarks/results"
ROUNDS, QUICK_ROUNDS = 3, 1
#: The default workloads and systems of each suite.
SUITES = {"large": (WORKLOADS, DEFAULT), "users": (USERS, OF_USERS)}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--suite",
        choices=SUITES,
        default="large",
        help="of workloads and systems; users: small models (default: large)",
    )
    add("--only", type=names(ALL, LISTS), metavar="WORKLOADS", help="names between commas")
    add("--systems", type=names(SYSTEMS), metavar="SYSTEMS", help="names between commas")
    add("--rounds", type=at_least_one, help=f"default: {ROUNDS}, with --quick {QUICK_ROUNDS}")
    add("--quick", action="store_true", help="small workloads, in forks of one process: under four minutes")
    add("--scaling", type=names(ALL, LISTS), metavar="WORKLOADS", help="instead: nano on 1, 2, … threads and processes")
    add("--levers", type=names(ALL, LISTS), metavar="WORKLOADS", help="instead: nano less each of the steps it applied")
    add("--output", metavar="NAME", help=f"keep NAME.json and NAME.png in {RESULTS.relative_to(ROOT)}, or at a path")
    add("--limit", type=at_least_one, default=900, metavar="SECONDS", help="give a case up after (default: 900)")
    options = parser.parse_args(given)
    if sum(bool(each) for each in (options.only or options.systems, options.scaling, options.levers)) > 1:
        parser.error("--scaling and --levers name the workloads that they measure nano on: give one of them alone")
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.output = _output(
        options.output or ("scaling" if options.scaling else "levers" if options.levers else "latest")
    )
    try:  # fail now, and not after an hour
        _try_to_write(options.output)
    except (OSError, ValueError) as error:
        parser.error(f"--output: results cannot be stored ({error}): name a file that can be written")
    return options


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a case in progress is ended, too
    results = surroundings()
    print(heading(results))
    if options.scaling:
        _each(options, results, "scaling", scaling, scaling_table)
    elif options.levers:
        _each(options, results, "levers", levers, levers_table)
    else:
        _compare(options, results)


def _each(options: argparse.Namespace, results: dict[str, Any], name: str, measured: Any, shown: Any) -> None:
    """Run one kind of measurement of nano_loop on each workload, and show and store the results."""
    results |= {"rounds": options.rounds, "quick": options.quick, name: {}}
    for workload in getattr(options, name):
        results[name][workload] = found = measured(workload, options.rounds, options.quick, options.limit)
        print(shown(workload, found))
        _store(results, options.output)


def _compare(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Show and store each workload when it is measured, so that an interrupted run loses nothing."""
    left_out = NOT_QUICK if options.quick and not options.systems else {}
    workloads, systems = SUITES[options.suite]
    with forks() if options.quick else nullcontext(fresh) as run:
        plan = Plan(
            *(options.only or list(workloads), options.systems or list(systems)),
            *(options.rounds, options.quick, options.limit, run, left_out),
        )
        results |= {"suite": options.suite, "rounds": plan.rounds, "quick": options.quick, "workloads": {}}
        for measured in measure(plan):
            results["workloads"][measured.workload] = summary = summarize(measured)
            set_matmul_shares(results["workloads"])
            results["geometric_means"] = geometric_means(results["workloads"])
            tqdm.write(table(measured.workload, summary))
            _store(results, options.output)
    print(f"\n{means(results['geometric_means'])}\n")
    _draw(results, options.output)


def _output(name: str) -> Path:
    """Return the path of the results, without the suffix."""
    return Path(name) if "/" in name else RESULTS / name


def _try_to_write(output: Path) -> None:
    """Raise the error that writing the results would raise, without leaving a new file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    file = _name(output, "json")
    existed = file.exists()
    file.open("a").close()
    if not existed:
        file.unlink()


def _name(output: Path, suffix: str) -> Path:
    return output.with_name(f"{output.name}.{suffix}")


def _store(results: dict[str, Any], output: Path) -> None:
    _name(output, "json").write_text(json.dumps(results, indent=1) + "\n")


def _draw(results: dict[str, Any], output: Path) -> None:
    try:
        from benchmarks.chart import draw

        draw(results, _name(output, "png"))
    except ModuleNotFoundError as error:
        print(f"no chart: {error} (pip install -r requirements/default.txt)", file=sys.stderr)


if __name__ == "__main__":
    main()
