"""The picture of a search: a bar for the time of each candidate, drawn by matplotlib.

It does not import torch, so that `nano-loop tune` can look at the path before it starts a script.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nano_loop.errors import NanoConfigError, error_message

if TYPE_CHECKING:
    from nano_loop.cli.tuning.result import Tuning

_CHOSEN, _OTHER = "#1f6f4a", "#9aa5b1"  # colours of bars


def check_picture(path: str) -> None:
    """Raise a NanoConfigError if no picture can be drawn to a path, before it takes minutes to find out."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = 'Run: pip install "nano-loop[plot]"'
        raise NanoConfigError(error_message(f"--plot {path}", "a picture needs matplotlib", hint)) from error
    file = Path(os.path.abspath(path))
    if file.suffix and file.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise _refused(path, f"{file.suffix[1:]} is no format of it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _refused(path, "the folder does not exist, or is not writable")


def draw(tuning: Tuning, path: str) -> None:
    """Draw the times of the candidates into a file. Its name says the format, such as ``.png``."""
    from matplotlib.figure import Figure

    chosen, rows = tuning.rows[tuning.chosen], [row for row in tuning.rows if row.milliseconds is not None]
    lengths = [row.milliseconds or 0.0 for row in rows]
    ranges = [
        [max(length - 1e3 * min(row.seconds), 0) for length, row in zip(lengths, rows, strict=True)],
        [max(1e3 * max(row.seconds) - length, 0) for length, row in zip(lengths, rows, strict=True)],
    ]
    colours = [_CHOSEN if row is chosen else _OTHER for row in rows]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(rows)), layout="constrained")  # without a window
    axes = figure.add_subplot()
    axes.barh(range(len(rows)), lengths, xerr=ranges, color=colours, ecolor="#444444", capsize=2)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step (mean and range of two rounds)")
    for place, row in enumerate(rows):
        if row.speed_up is not None:
            axes.annotate(f" {row.speed_up:.2f}×", (0, place), va="center", color="white")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise _refused(path, str(error)) from error


def _refused(path: str, reason: str) -> NanoConfigError:
    got = f"the picture {path!r} cannot be written ({reason})"
    hint = "Name a file such as tune.png in a folder that exists"
    return NanoConfigError(error_message(got, "its name says the format, which matplotlib must know", hint))
