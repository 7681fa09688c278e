"""The chart of a search: a bar for each candidate that was timed, with its quartiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nano_loop.errors import NanoConfigError, error_message

_CHOSEN, _OTHER = "#1f6f4a", "#9aa5b1"
_MISSING = 'a picture needs matplotlib: pip install "nano-loop[plot]"'


class Bar(NamedTuple):
    """A candidate: its options, its time in milliseconds with the quartiles, and its speed-up if it is known."""

    name: str
    milliseconds: float
    low: float
    high: float
    speed_up: float | None
    is_chosen: bool


def draw(bars: Sequence[Bar], path: str | os.PathLike[str]) -> None:
    """Draw the bars into a file, whose name says the format.

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
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(bars)), layout="constrained")  # without a window
    axes = figure.add_subplot()
    times = [bar.milliseconds for bar in bars]
    errors = [
        [max(bar.milliseconds - bar.low, 0) for bar in bars],
        [max(bar.high - bar.milliseconds, 0) for bar in bars],
    ]
    colours = [_CHOSEN if bar.is_chosen else _OTHER for bar in bars]
    axes.barh(range(len(bars)), times, xerr=errors, color=colours, ecolor="#444444", capsize=2)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step (median and quartiles)")
    for place, bar in enumerate(bars):
        if bar.speed_up is not None:
            axes.annotate(f" {bar.speed_up:.2f}×", (0, place), va="center", color="white")
    try:
        figure.savefig(Path(path))
    except (OSError, ValueError) as error:
        got = f"the picture {os.fspath(path)!r} cannot be written ({error})"
        hint = "Name a file such as tune.png in a folder that exists"
        raise NanoConfigError(
            error_message(got, "its name says the format, which matplotlib must know", hint)
        ) from error
