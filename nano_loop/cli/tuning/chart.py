"""The picture of a search: a bar for the time of each candidate, drawn by matplotlib.

It does not import torch, so that `nano-loop tune` can look at the path before it starts a script.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nano_loop.errors import NanoConfigError, error_message

_CHOSEN, _OTHER = "#1f6f4a", "#9aa5b1"  # colours of bars


class Bar(NamedTuple):
    """A candidate: the time of a step in milliseconds, its rounds in seconds, and its speed."""

    name: str
    milliseconds: float
    rounds: Sequence[float]
    speed_up: float | None
    is_chosen: bool


def check_picture(path: Any) -> None:
    """Raise an error if no picture can be drawn to a path, before it takes minutes to find out.

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
        raise ImportError('a picture needs matplotlib: pip install "nano-loop[plot]"') from error
    file = Path(os.path.abspath(path))
    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix and file.suffix[1:].lower() not in formats:
        raise _refused(path, f"{file.suffix[1:]} is no format of it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _refused(path, "the folder does not exist, or is not writable")


def draw(bars: Sequence[Bar], path: Any) -> None:
    """Draw the bars into a file.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    NanoConfigError
        If the file cannot be written, or its format is not known.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    lengths = [bar.milliseconds for bar in bars]
    errors = [
        [max(bar.milliseconds - 1e3 * min(bar.rounds), 0) for bar in bars],
        [max(1e3 * max(bar.rounds) - bar.milliseconds, 0) for bar in bars],
    ]
    colours = [_CHOSEN if bar.is_chosen else _OTHER for bar in bars]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(bars)), layout="constrained")  # without a window
    axes = figure.add_subplot()
    axes.barh(range(len(bars)), lengths, xerr=errors, color=colours, ecolor="#444444", capsize=2)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step (mean and range of two rounds)")
    for place, bar in enumerate(bars):
        if bar.speed_up is not None:
            axes.annotate(f" {bar.speed_up:.2f}×", (0, place), va="center", color="white")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise _refused(path, str(error)) from error


def _refused(path: Any, reason: str) -> NanoConfigError:
    got = f"the picture {os.fspath(path)!r} cannot be written ({reason})"
    hint = "Name a file such as tune.png in a folder that exists"
    return NanoConfigError(error_message(got, "its name says the format, which matplotlib must know", hint))
