"""Time programs that use libraries, plain and under `nano-loop run`, unmodified.

python -m benchmarks.libraries --rounds 7 --write docs/libraries.md
python -m benchmarks.libraries --only bert,gcn --small

Each case is a fresh process, in the environment that `make test-libraries` sets up for its library, and the sides of a
program take turns.
"""

from __future__ import annotations

import argparse
import compileall
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from tqdm import tqdm

from benchmarks import markdown
from benchmarks.fresh import ROOT, Result, fresh
from benchmarks.libraries import PROGRAMS
from benchmarks.names import at_least_one, names
from benchmarks.rounds import in_turn
from nano_loop.cpu import read_machine

RUN = ("-m", "nano_loop", "run")
SIDES = {"plain": (), "fp32": RUN, "auto": (*RUN, "--precision", "auto")}
HEAD = ("library", "program", "fit, s", "script, s", "fp32: fit", "script", '`"auto"`: fit', "script", "over fp32")
BEGIN, END = "<!-- by benchmarks.libraries -->\n", "<!-- end -->"
RESAMPLES = 2000


def measure(programs: Sequence[str], rounds: int, small: bool, limit: float) -> dict[str, dict[str, list[Result]]]:
    """Return, by program and side, the measurement of each round's process."""
    results: dict[str, dict[str, list[Result]]] = {name: {side: [] for side in SIDES} for name in programs}
    with tqdm(total=rounds * len(programs) * len(SIDES), file=sys.stderr, unit="case", dynamic_ncols=True) as bar:
        for name in programs:
            for number in range(rounds):
                for side in in_turn([*SIDES], number):
                    bar.set_description(f"{name} {side}")
                    results[name][side].append(case(name, side, small, limit))
                    bar.update()
    return results


def case(name: str, side: str, small: bool, limit: float) -> Result:
    """Return the seconds of a fit and of the whole process, or the reason why there are none."""
    program = PROGRAMS[name]
    python = str(ROOT / f".venv-libraries-{program.torch}/bin/python")
    command = *SIDES[side], "-m", "benchmarks.libraries.case"
    start = time.perf_counter()
    job = {"program": name, "small": small}
    result = fresh(job, limit=limit, python=python, settings={"CUDA_VISIBLE_DEVICES": ""}, program=command)
    return result | {"script": time.perf_counter() - start}


def ratios(sides: Mapping[str, Sequence[Result]], faster: str, slower: str, key: str) -> list[float]:
    """Return round by round how many times faster a side is than another."""
    return [other[key] / own[key] for own, other in zip(sides[faster], sides[slower], strict=True)]


def lower_end(values: Sequence[float]) -> float:
    """Return the lower end of the 90% interval of the median, by resampling."""
    draws = random.Random(0)
    medians = (statistics.median(draws.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return sorted(medians)[RESAMPLES // 20]


def row(name: str, sides: Mapping[str, Sequence[Result]]) -> tuple[list[str], list[float]]:
    """Return a program's row of the table, and the ratios in it."""
    program = PROGRAMS[name]
    titles = [program.library, program.title]
    reasons = [result["reason"] for results in sides.values() for result in results if "reason" in result]
    if reasons:
        return [*titles, reasons[0], *[""] * 6], []
    seconds = [statistics.median(result[key] for result in sides["plain"]) for key in ("fit", "script")]
    compared = [(side, "plain", key) for side in ("fp32", "auto") for key in ("fit", "script")]
    found = [ratios(sides, *each) for each in (*compared, ("auto", "fp32", "fit"))]
    cells = [f"{statistics.median(values):.2f} ({lower_end(values):.2f})" for values in found]
    return [*titles, *(f"{value:.1f}" for value in seconds), *cells], [statistics.median(values) for values in found]


def page(results: Mapping[str, Mapping[str, Sequence[Result]]], rounds: int) -> str:
    """Return the table, with the machine, the date and the geometric means."""
    rows = {name: row(name, sides) for name, sides in results.items()}
    columns = [*zip(*(values for _, values in rows.values() if values), strict=True)]
    means = [f"{statistics.geometric_mean(column):.2f} ({min(column):.2f})" for column in columns]
    machine = read_machine()
    title = f"{date.today()}, {machine.name}, {machine.num_threads} cores, {rounds} rounds:"
    last = ["geometric mean (lowest)", "", "", "", *means]
    return f"{title}\n\n{markdown.table(HEAD, [*(cells for cells, _ in rows.values()), *([last] if means else [])])}\n"


def written(text: str, measured: str) -> str:
    """Return a document with the results between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"there is no {BEGIN.strip()} with a {END} after it")
    return f"{before}{BEGIN}{measured}{end}{after}"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.libraries", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--only",
        type=names({name: each.prepare for name, each in PROGRAMS.items()}),
        default=[*PROGRAMS],
        metavar="PROGRAMS",
    )
    add("--rounds", type=at_least_one, default=7, help="default: 7")
    add("--small", action="store_true", help="fits of tests, of less than a second")
    add("--limit", type=float, default=300, help="seconds after which a case is given up (default: 300)")
    add("--write", type=Path, metavar="FILE", help="put the table into a document")
    options = parser.parse_args(given)
    compileall.compile_dir(ROOT / "nano_loop", quiet=2)  # as an installation does
    measured = page(measure(options.only, options.rounds, options.small, options.limit), options.rounds)
    print(measured)
    if options.write:
        options.write.write_text(written(options.write.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main()
