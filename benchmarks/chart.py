"""Draw bar charts: each system's speed relative to the best peer, and the README's speed-ups over plain PyTorch."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.surroundings import heading

#: By the workload's position: the ratio to the best peer, and its lowest and highest over the rounds.
Bars = dict[int, tuple[float, float, float]]
#: By workload and system: the speed-up over plain PyTorch, and its lowest and highest over the rounds.
SpeedUps = dict[str, dict[str, tuple[float, float, float]]]

COLOURS = ("#b5b5b5", "#e0995e", "#1f6fb4")  # plain, the best peer, nano_loop
_MANY = 10  # number of workloads from which on names are written smaller
_TALL = 10  # times: with a bar this high, others are visible only on a logarithmic scale


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a PNG; it needs matplotlib.

    Parameters
    ----------
    results : dict
        What `benchmarks.run` stores.
    path : pathlib.Path
        The path of the PNG.
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


def _draw_bars(axes: Any, bars: Bars, shift: float, width: float, label: str, colour: str | None = None) -> None:
    heights = [ratio for ratio, _, _ in bars.values()]
    below = [ratio - low for ratio, low, _ in bars.values()]
    above = [high - ratio for ratio, _, high in bars.values()]
    places = [place + shift * width for place in bars]
    axes.bar(places, heights, width, yerr=[below, above], label=label, color=colour, error_kw={"linewidth": 0.8})


def draw_speed_ups(suites: Sequence[SpeedUps], path: Path) -> None:
    """Write a PNG with the plotted values in its "Description", so that a test can read them back.

    The same values, with the same matplotlib, result in the same bytes.
    """
    metadata = {"Software": None, "Description": json.dumps(suites)}
    speed_up_figure(suites).savefig(path, dpi=150, metadata=metadata)


def speed_up_figure(suites: Sequence[SpeedUps]) -> Any:
    """Return the figure: axes for each suite, with a bar for each workload and system.

    The last bar of a workload has its number above it. The scale is logarithmic if one bar would hide the others.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2 * len(suites)), layout="constrained")
    for axes, speed_ups in zip(figure.subplots(len(suites), squeeze=False)[:, 0], suites, strict=True):
        _draw_speed_ups(axes, speed_ups)
    return figure


def _draw_speed_ups(axes: Any, speed_ups: SpeedUps) -> None:
    systems = list(next(iter(speed_ups.values())))
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        bars = {place: each[system] for place, each in enumerate(speed_ups.values())}
        _draw_bars(axes, bars, number - (len(systems) - 1) / 2, width, system, COLOURS[number % len(COLOURS)])
    for place, each in enumerate(speed_ups.values()):
        ratio, _, high = each[systems[-1]]
        top = place + (len(systems) - 1) / 2 * width, high
        axes.annotate(f"{ratio:.1f}×", top, (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.axhline(1, color="black", linewidth=0.8)
    labels, are_many = list(speed_ups), len(speed_ups) >= _MANY
    if are_many:
        labels = ["\n".join(part for line in label.split("\n") for part in textwrap.wrap(line, 12)) for label in labels]
    axes.set_xticks(range(len(labels)), labels, fontsize=7 if are_many else 9)
    if max(high for each in speed_ups.values() for _, _, high in each.values()) > _TALL:
        axes.set_yscale("log")
        axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axes.set_ylim(0.5)
        axes.minorticks_off()
    axes.set_ylabel("speed-up over plain PyTorch, fp32")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02, y=0.08)
    axes.legend(frameon=False, ncols=len(systems), loc="lower center", bbox_to_anchor=(0.5, 1))
