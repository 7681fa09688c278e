"""Draws the times of the candidates of a search."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nano_loop.errors import NanoConfigError, problem

if TYPE_CHECKING:
    from nano_loop.trials.tuning import Tuning

_CHOSEN, _OTHER = "#1f6f4a", "#9aa5b1"
_MISSING = 'a picture needs matplotlib: pip install "nano-loop[plot]"'


def draw(tuning: Tuning, path: str | os.PathLike[str]) -> None:
    """Draw a bar for each candidate that was timed, with its quartiles.

    Parameters
    ----------
    tuning : Tuning
        The result of the search.
    path : str or os.PathLike
        The file, whose name says the format.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    NanoConfigError
        If the file cannot be written, or its format is not known.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(_MISSING) from error
    timed: list[Any] = [(number, row) for number, row in enumerate(tuning.rows) if row.milliseconds is not None]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(timed)), layout="constrained")  # without a window
    axes = figure.add_subplot()
    places = range(len(timed))
    times = [row.milliseconds for _, row in timed]
    lows, highs = zip(*(row.spread or (row.milliseconds, row.milliseconds) for _, row in timed), strict=True)
    errors = [[max(t - low, 0) for t, low in zip(times, lows, strict=True)]]
    errors += [[max(high - t, 0) for t, high in zip(times, highs, strict=True)]]
    colours = [_CHOSEN if number == tuning.chosen else _OTHER for number, _ in timed]
    axes.barh(places, times, xerr=errors, color=colours, ecolor="#444444", capsize=2)
    axes.set_yticks(places, [row.name for _, row in timed])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step (median and quartiles)")
    for place, (_, row) in zip(places, timed, strict=True):
        if row.speed_up is not None:
            axes.annotate(f" {row.speed_up:.2f}×", (0, place), va="center", color="white")
    try:
        figure.savefig(Path(path))
    except (OSError, ValueError) as error:
        given = f"the picture {os.fspath(path)!r} cannot be written ({error})"
        advice = "Name a file such as tune.png in a folder that exists"
        raise NanoConfigError(problem(given, "its name says the format, which matplotlib must know", advice)) from error
