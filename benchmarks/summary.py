"""Compute the figures that are shown and stored: medians, and ratios round by round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.rounds import Measured
from benchmarks.systems import LIMITS, OURS

Summary = dict[str, Any]
#: A round is disturbed if the machine reached less than this share of its best rate.
DISTURBED = 0.8


def summarize(measured: Measured) -> Summary:
    """Return a workload's figures.

    The best peer is the system other than nano_loop's own with the smallest median. A system's
    ``ratio_to_best_peer`` is the median, over the rounds, of the best peer's time over the system's: above 1 the
    system is faster. ``matmul_share`` and ``disturbed_rounds`` are left to `set_matmul_shares`. A system that was not
    measured in every round has None in each place, and its reason.
    ``use_ipex`` compares nano_loop with IPEX and manual IPEX.
    """
    medians = {system: _median_ms(measured, system) for system in measured.rounds[0]}
    peers = {system: ms for system, ms in medians.items() if ms and system not in (*OURS, *LIMITS)}
    best = min(peers, key=lambda system: peers[system]) if peers else None
    return {
        "flops_per_step": measured.flops.get("flops"),
        "flops_reason": measured.flops.get("reason"),
        "matmul_gflops": measured.matmul,
        "disturbed_rounds": [],
        "best_peer": best,
        "systems": {system: _system(measured, system, best) for system in medians},
        "use_ipex": _use_ipex(measured, medians),
    }


def _use_ipex(measured: Measured, medians: dict[str, float | None]) -> Summary | None:
    """Compare ``use_ipex=True`` with manual IPEX, and with nano_loop without it; None if one is missing."""
    with_ipex, without = medians.get("nano_ipex"), medians.get("nano")
    if not with_ipex or not without or not medians.get("ipex"):
        return None
    by_hand = _ratios(measured, "ipex", "nano_ipex")
    return {
        "ratio_to_ipex_by_hand": _median(by_hand),
        "ratio_to_ipex_by_hand_range": [min(by_hand), max(by_hand)],
        "ratio_to_nano": _median(_ratios(measured, "nano", "nano_ipex")),
        "faster": "nano_ipex" if with_ipex < without else "nano",
    }


def _reason(measured: Measured, system: str) -> str | None:
    return next((each[system]["reason"] for each in measured.rounds if "reason" in each[system]), None)


def _values(measured: Measured, system: str, key: str) -> list[float]:
    """Return a figure of each round, or an empty list if one is missing."""
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
        "matmul_share": None,
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


def set_matmul_shares(workloads: dict[str, Summary]) -> None:
    """Set each system's ``matmul_share``, relative to the best rate of the machine in the run so far.

    A rate measured together with a case may be low because other programs used the machine at that moment; the share
    would then be too high. These rounds, counted from 1, are each workload's ``disturbed_rounds``.
    """
    best = max((_rate(found) for each in workloads.values() for found in each["matmul_gflops"]), default=0.0)
    for each in workloads.values():
        rates = enumerate(map(_rate, each["matmul_gflops"]), 1)
        each["disturbed_rounds"] = [number for number, rate in rates if 0 < rate < DISTURBED * best]
        for row in each["systems"].values():
            known = each["flops_per_step"] and row["median_ms"] and best
            row["matmul_share"] = each["flops_per_step"] / (row["median_ms"] * 1e6) / best if known else None


def _rate(found: dict[str, Any]) -> float:
    """Return the machine's best rate in a round, or 0 if it was not measured."""
    return 0.0 if "reason" in found else float(max(found.values()))


def geometric_means(workloads: dict[str, Summary]) -> Summary:
    """Return, for each system of ours, the geometric means of its ratios, and the number of workloads."""
    return {system: _means(workloads, system) for system in OURS}


def _means(workloads: dict[str, Summary], system: str) -> Summary:
    rows = [each["systems"][system] for each in workloads.values() if system in each["systems"]]
    means: Summary = {}
    for name, key in (("over_best_peer", "ratio_to_best_peer"), ("over_plain", "ratio_to_plain")):
        ratios = [row[key] for row in rows if row[key] is not None]
        means[name] = statistics.geometric_mean(ratios) if ratios else None
        means[f"least_{name}"] = min(ratios, default=None)
        means[f"workloads_{name}"] = len(ratios)
    return means
