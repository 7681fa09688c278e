"""Draws a run as bars: each system's speed, of the best peer's, on each workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.surroundings import heading

#: By the workload's place: the ratio to the best peer, and its lowest and highest over the rounds.
Bars = dict[int, tuple[float, float, float]]


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a PNG; it needs matplotlib.

    Parameters
    ----------
    results : dict
        What `benchmarks.run` stores.
    path : pathlib.Path
        The file.
    """
    from matplotlib.figure import Figure

    workloads = results["workloads"]
    figure = Figure(figsize=(max(6.0, 2.0 * len(workloads)), 4.5), layout="constrained")
    axes = figure.subplots()
    systems = _drawn(workloads)
    for number, (system, bars) in enumerate(systems.items()):
        _draw_bars(axes, bars, number - (len(systems) - 1) / 2, 0.8 / len(systems), system)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(workloads)), list(workloads))
    axes.set_ylabel("speed over the best peer's")
    axes.set_title(heading(results), fontsize="medium")
    if systems:
        axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=150)


def _drawn(workloads: dict[str, Any]) -> dict[str, Bars]:
    """Return the bars of each system that was measured."""
    systems = dict.fromkeys(system for each in workloads.values() for system in each["systems"])
    found = {system: _bars(workloads, system) for system in systems}
    return {system: bars for system, bars in found.items() if bars}


def _bars(workloads: dict[str, Any], system: str) -> Bars:
    rows = [each["systems"].get(system, {}) for each in workloads.values()]
    return {
        place: (row["ratio_to_best_peer"], *row["ratio_to_best_peer_range"])
        for place, row in enumerate(rows)
        if row.get("ratio_to_best_peer")
    }


def _draw_bars(axes: Any, bars: Bars, shift: float, width: float, label: str) -> None:
    heights = [ratio for ratio, _, _ in bars.values()]
    below = [ratio - low for ratio, low, _ in bars.values()]
    above = [high - ratio for ratio, _, high in bars.values()]
    places = [place + shift * width for place in bars]
    axes.bar(places, heights, width, yerr=[below, above], label=label, error_kw={"linewidth": 0.8})
