"""Show the operators between the products of a step under nano_loop, with their time, bytes and possible saving.

python -m benchmarks.between
python -m benchmarks.between --only group_norm_unet,t5 --threads 1
python -m benchmarks.between --only tuned --output NAME

An operator that only reads its inputs and writes its outputs can be as fast as the machine's memory. Any additional
time could be saved by a better kernel. Each workload runs in a fresh process, in bf16 with default options.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.fresh import ROOT, Result, fresh
from benchmarks.markdown import table
from benchmarks.names import at_least_one, names
from benchmarks.surroundings import heading, surroundings
from benchmarks.workloads import ALL, LISTS, UNTUNED, WORKLOADS

RESULTS = ROOT / "benchmarks/results"
LARGEST = 10
_WORTH_A_LINE = 1e6  # bytes: below, call overhead dominates
_HEAD = (
    "operator",
    "part",
    "calls a step",
    "ms",
    "MB",
    "GB/s",
    "of the memory's rate",
    "could save, ms",
    "of the step",
)
_HEAD_OF_MODELS = ("model", "step, ms", "between products, ms", "could save, ms", "of the step", "most of it")


def rows_of(workload: str, found: Result) -> list[dict[str, Any]]:
    """Return a workload's operators with their possible saving, the largest first."""
    rate, step = found["memory_rate"], found["step_ms"]
    rows = []
    for row in found["rows"]:
        possible = row["bytes"] / rate * 1e3
        saving = {"workload": workload, "share": possible / row["ms"] if row["ms"] else 0.0}
        saving |= {"saved_ms": max(row["ms"] - possible, 0.0)}
        rows.append({**row, **saving, "of_step": saving["saved_ms"] / step})
    return sorted(rows, key=lambda row: -row["saved_ms"])


def operators(rows: Iterable[Mapping[str, Any]], with_workload: bool = False) -> str:
    """Return a table of operators. A share above 100% has a star: the tensors are in a cache."""
    return table((*["model"] * with_workload, *_HEAD), [_cells(row, with_workload) for row in rows])


def _cells(row: Mapping[str, Any], with_workload: bool) -> list[str]:
    share = f"{row['share']:.0%}{'*' if row['share'] > 1 else ''}"
    cells = [f"`{row['operator']}`", row["part"], f"{row['calls']}", f"{row['ms']:.2f}", f"{row['bytes'] / 1e6:.1f}"]
    rate = row["bytes"] / row["ms"] / 1e6 if row["ms"] else 0.0
    cells += [f"{rate:.1f}", share, f"{row['saved_ms']:.2f}", f"{row['of_step']:.1%}"]
    return [*[row["workload"]] * with_workload, *cells]


def savings_of_models(results: Mapping[str, Any]) -> str:
    """Return a table with a line for each workload."""
    lines = []
    for name, each in results["between"].items():
        if "reason" in each:
            lines.append([name, each["reason"], *[""] * (len(_HEAD_OF_MODELS) - 2)])
            continue
        rows = rows_of(name, each)
        saved = sum(row["saved_ms"] for row in rows)
        numbers = [f"{value:.1f}" for value in (each["step_ms"], sum(row["ms"] for row in rows), saved)]
        most = ", ".join(f"`{row['operator']}` {row['saved_ms']:.1f}" for row in rows[:3])
        lines.append([name, *numbers, f"{saved / each['step_ms']:.0%}", most])
    return table(_HEAD_OF_MODELS, lines)


def largest(found: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Return the operators of all workloads whose saving is the largest part of their step."""
    every = (row for name, each in found.items() if "reason" not in each for row in rows_of(name, each))
    rows = [row for row in every if row["bytes"] >= _WORTH_A_LINE]
    return sorted(rows, key=lambda row: -row["of_step"])[:LARGEST]


def largest_savings(results: Mapping[str, Any]) -> str:
    """Return the table of the largest savings of all workloads."""
    return operators(largest(results["between"]), with_workload=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.between", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--only",
        type=names(ALL, LISTS),
        default=[*WORKLOADS, *UNTUNED],
        metavar="WORKLOADS",
        help="names between commas",
    )
    add("--threads", type=at_least_one, help="threads of torch; one is disturbed least by other programs")
    add("--rows", type=at_least_one, default=8, help="of each workload's table (default: 8)")
    add("--small", action="store_true", help="small workloads: only to see that everything runs")
    add("--limit", type=at_least_one, default=900, metavar="SECONDS", help="give a case up after (default: 900)")
    add("--output", metavar="NAME", help=f"keep NAME.json in {RESULTS.relative_to(ROOT)}, or at a path")
    options = parser.parse_args(given)
    found: dict[str, Result] = {}
    results = {**surroundings(), "threads": options.threads, "quick": options.small, "between": found}
    print(heading(results))
    for workload in tqdm(options.only, file=sys.stderr, unit="workload"):
        job = {"task": "between", "workload": workload, "small": options.small, "threads": options.threads}
        found[workload] = each = fresh(job, limit=options.limit)
        text = each["reason"] if "reason" in each else operators(rows_of(workload, each)[: options.rows])
        tqdm.write(f"\n{workload}\n\n{text}")
        if options.output:
            (RESULTS / f"{options.output}.json").write_text(json.dumps(results, indent=1) + "\n")
    print("", savings_of_models(results), largest_savings(results), sep="\n\n")


if __name__ == "__main__":
    main()
