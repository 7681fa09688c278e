"""The result of a search: every candidate with its times, as a table and as a chart, and the chosen options.

It does not import torch, so that `nano-loop tune` can check the path of the chart before it starts a script.
"""

from __future__ import annotations

import os
import statistics
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_loop.cli.tuning.candidates import STEPS_BY_DEFAULT
from nano_loop.config.declarations import MEASURING
from nano_loop.config.options import Options
from nano_loop.config.precisions import SHORT_NAMES
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.runtime.objects.report import digits

_GIB = 1 << 30
_MANY = 3  # from this number of disabled steps on, the table only counts them
_WIDTH = 100  # columns of the text
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # words
_PLAIN, _AS_IT_IS = "plain PyTorch", "unchanged"
INTERRUPTED = "not measured: interrupted"  # the note of a row
_CHOSEN, _OTHER = "#1f6f4a", "#9aa5b1"  # colours of bars


@dataclass
class Row:
    """One candidate."""

    options: dict[str, Any]  # in addition to those of all candidates
    plain: bool = False  # whether this is the loop without nano_loop
    #: The step time per batch, round by round. N processes train on N batches per step.
    seconds: list[float] = field(default_factory=list)
    milliseconds: float | None = None  # their mean
    speed_up: float | None = None  # relative to the loop without nano_loop
    memory: int | None = None  # the peak memory of rank 0's process in bytes
    #: The largest error relative to fp64; None if it was not compared. A loop's loss is the outputs' mean square.
    loss: float | None = None
    gradients: float | None = None
    note: str = ""  # why it failed or was not measured further

    def measure(self, own: Row, plain: Row) -> None:
        """Compute the mean over the rounds, relative to the unchanged options, which run in each round."""
        if not self.seconds or not own.seconds:
            return
        self.milliseconds = 1e3 * statistics.fmean(own.seconds) / statistics.fmean(self._ratios(own))
        if plain.seconds:
            of_plain = statistics.fmean(own.seconds) / statistics.fmean(plain._ratios(own))
            self.speed_up = 1.0 if self.plain else 1e3 * of_plain / self.milliseconds

    def pays(self, own: Row, least: float) -> bool:
        """Whether it is faster than the unchanged options in each round, and by a factor of `least` overall."""
        ratios = self._ratios(own)
        return bool(ratios) and min(ratios) > 1 and statistics.fmean(ratios) >= least

    def _ratios(self, own: Row) -> list[float]:
        return [before / after for before, after in zip(own.seconds, self.seconds, strict=False)]

    @property
    def name(self) -> str:
        """The options as a user would write them."""
        if self.plain:
            return _PLAIN
        left_out = [name for name in STEPS_BY_DEFAULT if self.options.get(name) is False]
        if len(left_out) < _MANY:
            return as_text(self.options) or _AS_IT_IS
        rest = as_text({name: value for name, value in self.options.items() if name not in left_out})
        return ", ".join([*([rest] if rest else []), f"{len(left_out)} default steps off"])

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        least, most = (digits(1e3 * seconds) for seconds in (min(self.seconds or [0]), max(self.seconds or [0])))
        spread = f" ({least}–{most})" if len(self.seconds) > 1 else ""
        return (
            "–" if self.milliseconds is None else f"{digits(self.milliseconds)}{spread}",
            "–" if self.speed_up is None else f"{self.speed_up:.2f}×",
            "–" if self.memory is None else f"{self.memory / _GIB:.2f}",
            _error(self.loss),
            _error(self.gradients),
            f"{self.name}  {self.note}".rstrip(),
        )


@dataclass
class Tuning:
    """The result of `nano-loop tune`."""

    options: dict[str, Any]  # the options to write: the chosen ones and those that were given
    line: str  # the line of code with them, such as ``@nano(precision="bf16")``
    #: The unchanged options, the loop without nano_loop, and the others in the order of the search.
    rows: list[Row]
    chosen: int  # the index of the row with the chosen options
    seconds: float  # how long the search took
    changes: dict[str, Any] = field(default_factory=dict)  # the options that the search has changed
    remarks: list[str] = field(default_factory=list)  # notes about the choice
    #: The fraction of runnable time that threads waited for CPUs used by other programs.
    waits: float = 0.0
    date: str = ""  # when the search ended

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        heads = ("ms per step", "speed", "GiB", "loss", "gradients", "options")
        table = [heads, *(row.cells() for row in self.rows)]
        widths = [max(len(cells[place]) for cells in table) for place in range(len(heads) - 1)]
        for number, (*cells, options) in enumerate(table):
            mark = "→" if number == self.chosen + 1 else " "
            numbers = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            yield _wrapped(options, f"{mark} {numbers}  ")
        yield ""
        yield from map(_wrapped, self.remarks)
        is_complete = all(row.note != INTERRUPTED for row in self.rows)
        yield f"{'fastest' if is_complete else 'fastest so far'}, after {self.seconds:.0f} s:"
        yield f"  {self.line}"


def _wrapped(text: str, start: str = "") -> str:
    """Wrap a text for a terminal, with later lines indented to its start."""
    indent = " " * len(start)
    return textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=indent, **_WHOLE)


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def as_text(values: Mapping[str, Any]) -> str:
    """Return options as a user would write them, such as ``precision="bf16", channels_last=True``."""
    return ", ".join(f"{name}={_literal(name, value)}" for name, value in values.items())


def differing(options: Options) -> dict[str, Any]:
    """Return the options that differ from the default, except those that only measure or follow from ``exact``."""
    values, plain = options.as_dict(), Options(exact=options.exact)
    exact = {"exact": True} if options.exact else {}
    names = [name for name in values if name not in MEASURING and values[name] != getattr(plain, name)]
    return exact | {name: values[name] for name in names}


def _literal(name: str, value: Any) -> str:
    if name == "precision":
        short = next((text for text, precision in SHORT_NAMES.items() if precision == value), value)
        value = int(short) if str(short).isdecimal() else short
    return f'"{value}"' if isinstance(value, str) else repr(value)


def check_picture(path: str) -> None:
    """Raise a NanoConfigError if a chart cannot be saved to a path, before the search takes minutes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = 'Run: pip install "matplotlib>=3.8"'
        raise NanoConfigError(error_message(f"--plot {path}", "a chart needs matplotlib", hint)) from error
    file = Path(os.path.abspath(path))
    if file.suffix and file.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise _refused(path, f"{file.suffix[1:]} is not a format that matplotlib supports")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _refused(path, "the folder does not exist, or is not writable")


def draw(tuning: Tuning, path: str) -> None:
    """Save a chart of the candidates' times to a file. The suffix of its name selects the format, such as ``.png``."""
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
    axes.set_xlabel("milliseconds per step (mean and range of two rounds)")
    for place, row in enumerate(rows):
        if row.speed_up is not None:
            axes.annotate(f" {row.speed_up:.2f}×", (0, place), va="center", color="white")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise _refused(path, str(error)) from error


def _refused(path: str, reason: str) -> NanoConfigError:
    hint = "Name a file such as tune.png in a folder that exists"
    return NanoConfigError(error_message(f"--plot {path}", f"the chart cannot be written ({reason})", hint))
