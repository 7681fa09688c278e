"""Measure the peak memory of training relative to plain torch, in fresh processes.

The peak is that of the whole process (VmHWM) after the model is built: then, writing 5 to `/proc/self/clear_refs`
resets the high-water mark. By then, both sides have imported the same modules.

Run ``python -m benchmarks.peaks lstm,bert --systems nano_fp32,nano_auto --steps 6``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import systems
from benchmarks.fresh import fresh, keep_output
from benchmarks.names import find
from benchmarks.workloads import ALL, LISTS
from nano_loop import nano  # noqa: F401 - both sides have imported it before the mark is set


def peak(workload: str, system: str, steps: int, small: bool) -> dict[str, int]:
    """Train for some steps; return kB: the memory once the model was built, and the peak afterwards."""
    work = find(workload, ALL)(small)
    work.model.train()
    Path("/proc/self/clear_refs").write_text("5")
    built = _status("VmHWM")
    if system.startswith("{"):
        systems.nano_with(work, steps, **json.loads(system))
    else:
        find(system, systems.SYSTEMS)(work, steps)
    return {"built": built, "peak": _status("VmHWM")}


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def main() -> None:
    """Print a row for each workload: plain torch's peak, and each system's relative to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", help="names or lists of workloads, separated by commas")
    parser.add_argument(
        "--systems", default=["nano_fp32"], nargs="+", help="names of systems, or nano_loop's options as JSON"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    names = [name for each in options.workloads.split(",") for name in LISTS.get(each, (each,))]
    print(f"| workload | built, MB | plain, MB | {' | '.join(options.systems)} |")
    for name in names:
        row = []
        for system in ("plain", *options.systems):
            job = {"workload": name, "system": system, "steps": options.steps, "small": options.small}
            row.append(fresh(job, limit=900, program=("-m", "benchmarks.peaks")))
        plain = row[0]
        cells = [
            f"{each['peak'] / plain['peak']:.3f} ({(each['peak'] - plain['peak']) / 1024:+.0f})"
            if "peak" in each
            else each["reason"]
            for each in row[1:]
        ]
        print(
            f"| {name} | {plain['built'] / 1024:.0f} | {plain['peak'] / 1024:.0f} | {' | '.join(cells)} |", flush=True
        )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        out, job = keep_output(), json.loads(sys.argv[1])
        print(json.dumps(peak(job["workload"], job["system"], job["steps"], job["small"])), file=out, flush=True)
    else:
        main()
