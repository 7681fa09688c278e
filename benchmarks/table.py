"""Show a workload's figures as a table on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

HEAD = f"  {'system':<18}{'ms per step':>11}{'× best peer, by round':>25}{'× plain':>9}{'of matmul':>11}{'peak MB':>9}"


def table(workload: str, summary: dict[str, Any]) -> str:
    """Return one row per system, with its speed over the best peer's: the median of the rounds, and their range."""
    lines = [f"\n{_title(workload, summary)}", HEAD, *_rows(summary["systems"]), *_ipex(summary["use_ipex"])]
    return "\n".join([*lines, *_disturbed(summary["disturbed_rounds"])])


def _title(workload: str, summary: dict[str, Any]) -> str:
    flops, best = summary["flops_per_step"], summary["best_peer"]
    counted = f"{flops / 1e9:.4g} GFLOP a step" if flops else f"FLOPs not counted: {summary['flops_reason']}"
    return f"{workload} · {counted} · best peer: {best or 'none'}"


def _rows(systems: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, row in systems.items():
        if row["reason"]:
            yield f"  {name:<18}{'–':>11}  {row['reason']}"
        else:
            yield f"  {name:<18}{row['median_ms']:>11.2f}{_ratio(row):>25}{_figures(row)}"


def _ipex(found: dict[str, Any] | None) -> Iterator[str]:
    if found:
        low, high = found["ratio_to_ipex_by_hand_range"]
        beside = f"{found['ratio_to_ipex_by_hand']:.2f}× the speed of IPEX by hand ({low:.2f} to {high:.2f})"
        yield f"  nano_ipex has {beside}, and {found['ratio_to_nano']:.2f}× nano's; {found['faster']} is faster"


def _disturbed(rounds: list[int]) -> Iterator[str]:
    if rounds:
        yield f"  disturbed: round {', '.join(map(str, rounds))}, when the machine was far below its best rate"


def _ratio(row: dict[str, Any]) -> str:
    if row["ratio_to_best_peer"] is None:
        return "–"
    low, high = row["ratio_to_best_peer_range"]
    return f"{row['ratio_to_best_peer']:.2f} ({low:.2f} to {high:.2f})"


def _figures(row: dict[str, Any]) -> str:
    plain, share = row["ratio_to_plain"], row["matmul_share"]
    over_plain = "–" if plain is None else f"{plain:.2f}"
    of_matmul = "–" if share is None else f"{share:.0%}"
    return f"{over_plain:>9}{of_matmul:>11}{row['peak_rss_mb']:>9.0f}"


def means(found: dict[str, dict[str, Any]]) -> str:
    """Return a line for each system of ours that was measured: its geometric means over the workloads."""
    lines = []
    for system, row in found.items():
        parts = [
            f"{row[key]:.2f}× {words} ({row[f'workloads_{key}']} workloads, at the least {row[f'least_{key}']:.2f}×)"
            for key, words in (("over_best_peer", "the best peer's speed"), ("over_plain", "plain's"))
            if row[key] is not None
        ]
        if parts:
            lines.append(f"{system}, geometric mean: {', '.join(parts)}")
    return "\n".join(lines)
