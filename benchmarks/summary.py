"""Makes of what was measured the figures that are shown and stored: medians, and ratios round by round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.rounds import Measured
from benchmarks.systems import OURS

Summary = dict[str, Any]


def summarize(measured: Measured) -> Summary:
    """Return a workload's figures.

    The best peer is the system other than nano_loop's own with the smallest median. A system's
    ``ratio_to_best_peer`` is the median, over the rounds, of the best peer's time over the system's: above 1 the
    system is faster. ``matmul_share`` is how fast a step does its matrix products, over how fast the machine did
    large ones in the same round, in the dtype that is faster on it. A system that was not measured in every round
    has None in each place, and its reason.
    """
    medians = {system: _median_ms(measured, system) for system in measured.rounds[0]}
    peers = {system: ms for system, ms in medians.items() if ms and system not in OURS}
    best = min(peers, key=lambda system: peers[system]) if peers else None
    return {
        "flops_per_step": measured.flops.get("flops"),
        "flops_reason": measured.flops.get("reason"),
        "matmul_gflops": measured.matmul,
        "best_peer": best,
        "systems": {system: _system(measured, system, best) for system in medians},
    }


def _reason(measured: Measured, system: str) -> str | None:
    return next((each[system]["reason"] for each in measured.rounds if "reason" in each[system]), None)


def _values(measured: Measured, system: str, key: str) -> list[float]:
    """Return a figure of each round, or none at all where one is missing."""
    if _reason(measured, system):
        return []
    return [each[system][key] for each in measured.rounds]


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _median_ms(measured: Measured, system: str) -> float | None:
    return _median(_values(measured, system, "median_ms"))


def _system(measured: Measured, system: str, best: str | None) -> Summary:
    ratios = _ratios(measured, best, system)
    return {
        "median_ms": _median_ms(measured, system),
        "ratio_to_best_peer": _median(ratios),
        "ratio_to_best_peer_range": [min(ratios), max(ratios)] if ratios else None,
        "ratio_to_plain": _median(_ratios(measured, "plain", system)),
        "matmul_share": _median(_shares(measured, system)),
        "peak_rss_mb": max(_values(measured, system, "peak_rss_mb"), default=None),
        "first_step_ms": _median(_values(measured, system, "first_step_ms")),
        "reason": _reason(measured, system),
        "rounds": [each[system] for each in measured.rounds],
    }


def _ratios(measured: Measured, other: str | None, system: str) -> list[float]:
    """Return round by round how many times faster a system is than the other."""
    if other not in measured.rounds[0]:
        return []
    times = _values(measured, other, "median_ms"), _values(measured, system, "median_ms")
    return [other_ms / own_ms for other_ms, own_ms in zip(*times, strict=False)]


def _shares(measured: Measured, system: str) -> list[float]:
    flops = measured.flops.get("flops")
    if flops is None or any("reason" in each for each in measured.matmul):
        return []
    times = _values(measured, system, "median_ms")
    return [flops / (ms * 1e6) / max(each.values()) for ms, each in zip(times, measured.matmul, strict=False)]


def geometric_means(workloads: dict[str, Summary]) -> Summary:
    """Return, for each system of ours, the geometric means of its ratios, and of how many workloads they are."""
    return {system: _means(workloads, system) for system in OURS}


def _means(workloads: dict[str, Summary], system: str) -> Summary:
    rows = [each["systems"][system] for each in workloads.values() if system in each["systems"]]
    means: Summary = {}
    for name, key in (("over_best_peer", "ratio_to_best_peer"), ("over_plain", "ratio_to_plain")):
        ratios = [row[key] for row in rows if row[key] is not None]
        means[name] = statistics.geometric_mean(ratios) if ratios else None
        means[f"workloads_{name}"] = len(ratios)
    return means
