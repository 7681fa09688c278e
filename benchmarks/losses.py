"""Compare the losses of nano_loop's fp32 defaults with those of the plain loop, step by step, for each workload.

python -m benchmarks.losses
python -m benchmarks.losses --only bert,lstm --steps 20 --small

It ends with an error if a loss differs by a relative error of more than 1e-5. There is one exception: the plain loop's
own losses differ by as much if its weights are changed by a ten-millionth, the rounding error of fp32, and nano_loop's
losses differ by less than 1e-5 from those of the plain loop with torch's own fused optimizer. Weights, batches and
dropout masks are the same in all loops.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from benchmarks.fresh import fresh
from benchmarks.names import at_least_one, name, names
from benchmarks.systems import SYSTEMS, plain
from benchmarks.workloads import ALL, LISTS, WORKLOADS, Workload

TOLERANCE, ROUNDING = 1e-5, 1e-7


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.losses", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", type=names(ALL, LISTS), default=list(WORKLOADS), metavar="WORKLOADS", help="names between commas")
    add("--system", type=name(SYSTEMS), default="nano_fp32", help="what is held against plain (default: nano_fp32)")
    add("--steps", type=at_least_one, default=20, metavar="N", help="how many (default: 20)")
    add("--small", action="store_true", help="small workloads, as --quick has them")
    add("--limit", type=at_least_one, default=900, metavar="SECONDS", help="give a run up after (default: 900)")
    return parser.parse_args(given)


def losses(workload: str, system: str, options: argparse.Namespace, **others: float) -> list[float]:
    """Return the losses of training steps in a fresh process; end the program if there are none."""
    job = {"task": "losses", "workload": workload, "system": system, "small": options.small, "count": options.steps}
    job |= others
    found = fresh(job, limit=options.limit)
    if "reason" in found:
        sys.exit(f"{workload} under {system}: {found['reason']}")
    return list(found["losses"])


def difference(plain: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference between two series of losses; NaN counts as the largest."""
    return max((_off(a, b) for a, b in zip(plain, other, strict=True)), key=lambda off: (off != off, off))


def _off(a: float, b: float) -> float:
    if a == b:
        return 0.0
    return abs(a - b) / abs(a) if a else math.inf


def plain_fused(work: Workload, count: int) -> list[float]:
    """Run the plain loop with torch's own fused optimizer."""
    for group in work.optimizer.param_groups:
        group["fused"] = True
    return plain(work, count)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    print(
        f"| workload | loss at first | after {options.steps} steps | {options.system} differs by at most |"
        f" from plain with a fused optimizer | plain with weights off by {ROUNDING:.0e} |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    too_far = [workload for workload in options.only if not _compared(workload, options)]
    if too_far:
        sys.exit(f"off by more than {TOLERANCE:.0e} and than rounding explains: {', '.join(too_far)}")


def _compared(workload: str, options: argparse.Namespace) -> bool:
    """Show the differences between the losses of a workload, and return whether they are small enough."""
    reference, own = losses(workload, "plain", options), losses(workload, options.system, options)
    off = difference(reference, own)
    fused = difference(losses(workload, "benchmarks.losses:plain_fused", options), own)
    rounding = difference(reference, losses(workload, "plain", options, noise=ROUNDING))
    ends = f"{reference[0]:.5f} | {reference[-1]:.5f}"
    print(f"| {workload} | {ends} | {off:.1e} | {fused:.1e} | {rounding:.1e} |", flush=True)
    return off <= TOLERANCE or (off <= rounding and fused <= TOLERANCE)


if __name__ == "__main__":
    main()
