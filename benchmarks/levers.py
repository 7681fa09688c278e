"""Measure the value of each of nano_loop's steps on a workload: all steps and all steps but one, in turn.

Only steps that nano_loop applied to the workload are omitted. Combined effects of two steps are not shown.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.fresh import Result, fresh
from benchmarks.rounds import take_turns
from benchmarks.systems import ALL, LEVERS


def levers(workload: str, rounds: int, small: bool, limit: float) -> dict[str, dict[str, Any]]:
    """Return, by omitted step, the median ms per step, and how many times faster nano_loop is with it."""
    job = {"task": "levers", "workload": workload, "small": small}
    first = fresh({**job, "lever": ALL}, limit=limit)  # not counted: it shows which steps are applied
    left_out = [ALL, *(name for name in LEVERS if name in first.get("applied", ()))]
    jobs = {name: {"job": {**job, "lever": name}} for name in left_out}
    found = take_turns(jobs, rounds, limit, f"{workload} without")
    return {name: _row(found, name) for name in left_out}


def _row(rounds: list[dict[str, Result]], name: str) -> dict[str, Any]:
    """Return the figures of one line; None and the reason if it or all steps together were not measured."""
    reason = next((each[key]["reason"] for each in rounds for key in (name, ALL) if "reason" in each[key]), None)
    worth = [] if reason else [each[name]["median_ms"] / each[ALL]["median_ms"] for each in rounds]
    return {
        "median_ms": None if reason else statistics.median(each[name]["median_ms"] for each in rounds),
        "worth": statistics.median(worth) if worth else None,
        "worth_range": [min(worth), max(worth)] if worth else None,
        "peak_rss_mb": None if reason else max(each[name]["peak_rss_mb"] for each in rounds),
        "reason": reason,
        "rounds": [each[name] for each in rounds],
    }


def levers_table(workload: str, rows: dict[str, dict[str, Any]]) -> str:
    """Return it as a table for the terminal."""
    lines = [f"\n{workload}, nano", f"  {'without':<18}{'ms per step':>11}{'all is faster by':>24}{'peak MB':>9}"]
    for name, row in rows.items():
        if row["reason"]:
            lines.append(f"  {name or 'nothing':<18}{'–':>11}  {row['reason']}")
            continue
        low, high = row["worth_range"]
        worth = f"{row['worth']:.2f}× ({low:.2f} to {high:.2f})" if name else ""
        lines.append(f"  {name or 'nothing':<18}{row['median_ms']:>11.2f}{worth:>24}{row['peak_rss_mb']:>9.0f}")
    return "\n".join(lines)
