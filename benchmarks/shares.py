"""Estimate the step time of ranks with one core each that split a batch, from the time of one core for a share.

Of a batch of B samples and N ranks, each rank computes B / N, updates all weights and averages S bytes of gradients:

    step(N) = compute(B / N) + max(1, N · rate / memory) · (update + ring · S (5 N - 2) / N / rate)

- compute and update are CPU times of one core here, and rate is the bytes that a copy reads and writes per second.
- S (5 N - 2) / N is the bytes that a rank reads and writes to average, and ring the measured factor by which averaging
  takes longer than that (`benchmarks.averaging`).
- memory is the assumed bandwidth of the machine with N cores.

If each rank updates one Nth of the weights, update is update / N, and each rank reads and writes 2 S bytes more: it
writes its weights for the others, and copies theirs. Gradients are averaged all the same, since a loop may read them
once `backward()` has returned. Not included are waits for the slowest rank, the exchanges of batch norm, and a lower
clock if all cores compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.fresh import Result
from benchmarks.rounds import take_turns

COUNTS = (1, 2, 4, 8, 16)


def computed(
    workload: str, small: bool, limit: float, samples: int, ring: float, memory: float
) -> dict[str, dict[str, Any]]:
    """Return, by number of ranks, the parts of a step in milliseconds, and the speed relative to one rank."""
    counts = [count for count in COUNTS if samples % count == 0]
    work = {"task": "share", "workload": workload, "small": small}
    jobs = {
        str(count): {"job": {**work, "samples": samples // count}, "settings": {"OMP_NUM_THREADS": "1"}}
        for count in counts
    }
    (found,) = take_turns(jobs, 1, limit, workload)
    return {name: _step(int(name), result, found["1"], ring, memory) for name, result in found.items()}


def _step(count: int, share: Result, one: Result, ring: float, memory: float) -> dict[str, Any]:
    reason = share.get("reason") or one.get("reason")
    if reason:
        return {"reason": reason}
    crowded = max(1.0, count * one["rate_gb"] / memory)
    update = crowded * one["update_ms"]  # it does not depend on the samples
    moved = 0.0 if count == 1 else share["gradients_mb"] * (5 * count - 2) / count
    averaging, sending = (crowded * ring * size / one["rate_gb"] for size in (moved, 2 * share["gradients_mb"]))
    alone = one["compute_ms"] + one["update_ms"]
    by_shards = update if count == 1 else update / count + sending
    step, sharded = (share["compute_ms"] + averaging + each for each in (update, by_shards))
    return {
        "reason": None,
        "compute_ms": share["compute_ms"],
        "update_ms": update,
        "averaging_ms": averaging,
        "step_ms": step,
        "speed_up": alone / step,
        "sharded_update_speed_up": alone / sharded,
        "measured": dict(share),
    }


def computed_table(workload: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return it as a table for the terminal."""
    head = ("ranks", "compute", "update", "averaging", "step, ms", "speed-up", "update by shards")
    lines = [f"\n{workload}", "".join(f"{each:>18}" for each in head)]
    for count, row in rows.items():
        if row["reason"]:
            lines.append(f"{count:>18}  {row['reason']}")
            continue
        parts = (row[f"{part}_ms"] for part in ("compute", "update", "averaging", "step"))
        ratios = (row["speed_up"], row["sharded_update_speed_up"])
        lines.append("".join([f"{count:>18}", *(f"{part:>18.1f}" for part in parts), *(f"{r:>18.2f}" for r in ratios)]))
    return "\n".join(lines)
