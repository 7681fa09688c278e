"""Holds the losses of nano_loop's fp32 defaults against those of the plain loop, step by step, workload by workload.

python -m benchmarks.losses
python -m benchmarks.losses --only bert,lstm --steps 20 --small

It ends with an error where a loss differs by more than 1e-5 of its size, and by more than the losses of the plain loop
do when its weights are off by a ten-millionth, which is what fp32 rounds by. Weights, batches and masks of dropout are
the same in all loops.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.fresh import fresh
from benchmarks.names import at_least_one, names
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS

TOLERANCE, ROUNDING = 1e-5, 1e-7


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.losses", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", type=names(WORKLOADS), default=list(WORKLOADS), metavar="WORKLOADS", help="names between commas")
    add("--system", type=names(SYSTEMS), default=["nano_fp32"], help="what is held against plain (default: nano_fp32)")
    add("--steps", type=at_least_one, default=20, metavar="N", help="how many (default: 20)")
    add("--small", action="store_true", help="small workloads, as --quick has them")
    add("--limit", type=at_least_one, default=900, metavar="SECONDS", help="give a run up after (default: 900)")
    return parser.parse_args(given)


def losses(workload: str, system: str, options: argparse.Namespace, **others: float) -> list[float]:
    """Return the losses of training steps, in a process of their own; end the program where there are none."""
    job = {"task": "losses", "workload": workload, "system": system, "small": options.small, "count": options.steps}
    job |= others
    found = fresh(job, limit=options.limit)
    if "reason" in found:
        sys.exit(f"{workload} under {system}: {found['reason']}")
    return list(found["losses"])


def difference(plain: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference between two rows of losses, relative to the first; NaN is the largest."""
    return max((abs(a - b) / abs(a) for a, b in zip(plain, other, strict=True)), key=lambda off: (off != off, off))


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    (system,) = options.system
    too_far = []
    head = f"| workload | loss at first | after {options.steps} steps | {system} differs by at most |"
    print(f"{head} plain with weights off by {ROUNDING:.0e} |\n| --- | --- | --- | --- | --- |")
    for workload in options.only:
        plain = losses(workload, "plain", options)
        off = difference(plain, losses(workload, system, options))
        rounding = difference(plain, losses(workload, "plain", options, noise=ROUNDING))
        print(f"| {workload} | {plain[0]:.5f} | {plain[-1]:.5f} | {off:.1e} | {rounding:.1e} |", flush=True)
        if not off <= max(TOLERANCE, rounding):  # "not", for NaN
            too_far.append(workload)
    if too_far:
        sys.exit(f"off by more than {TOLERANCE:.0e} and than rounding explains: {', '.join(too_far)}")


if __name__ == "__main__":
    main()
