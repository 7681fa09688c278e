"""The result of a search: every candidate with its times, as a table and as a picture, and the options chosen.

It does not import torch, so that `nano-loop tune` can look at the path of the picture before it starts a script.
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
_MANY = 3  # omitted steps, which the table only counts
_WIDTH = 100  # columns of the text
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # words
_PLAIN, _AS_IT_IS = "plain PyTorch", "unchanged"
_CHOSEN, _OTHER = "#1f6f4a", "#9aa5b1"  # colours of bars


@dataclass
class Row:
    """One candidate."""

    options: dict[str, Any]  # besides those that all candidates have
    plain: bool = False  # whether it is the loop without nano_loop
    #: The time of a step for one batch, round by round. Several processes take as many batches per step.
    seconds: list[float] = field(default_factory=list)
    milliseconds: float | None = None  # their mean
    speed_up: float | None = None  # how many times as fast as the loop without nano_loop
    memory: int | None = None  # the most that the process of rank 0 has had, in bytes
    #: The largest error relative to fp64; None where no comparison was made. Of a loop, the loss is the mean square of
    #: the model's outputs.
    loss: float | None = None
    gradients: float | None = None
    note: str = ""  # why it was measured no further, or failed

    def measure(self, own: Row, plain: Row) -> None:
        """Take the mean of the rounds, as ratios to the unchanged options, which run in each round."""
        if not self.seconds or not own.seconds:
            return
        self.milliseconds = 1e3 * statistics.fmean(own.seconds) / statistics.fmean(self._ratios(own))
        if plain.seconds:
            of_plain = statistics.fmean(own.seconds) / statistics.fmean(plain._ratios(own))
            self.speed_up = 1.0 if self.plain else 1e3 * of_plain / self.milliseconds

    def pays(self, own: Row, least: float) -> bool:
        """Whether it is faster than the unchanged options in each round, and `least` times on the whole."""
        ratios = self._ratios(own)
        return bool(ratios) and min(ratios) > 1 and statistics.fmean(ratios) >= least

    def _ratios(self, own: Row) -> list[float]:
        return [before / after for before, after in zip(own.seconds, self.seconds, strict=False)]

    @property
    def name(self) -> str:
        """The options as a person writes them."""
        if self.plain:
            return _PLAIN
        left_out = [name for name in STEPS_BY_DEFAULT if self.options.get(name) is False]
        if len(left_out) < _MANY:
            return as_text(self.options) or _AS_IT_IS
        rest = as_text({name: value for name, value in self.options.items() if name not in left_out})
        return ", ".join([*([rest] if rest else []), f"without {len(left_out)} steps"])

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

    options: dict[str, Any]  # the options to write, chosen ones and those that were given
    line: str  # the line of code that has them, such as ``@nano(precision="bf16")``
    #: The unchanged options, the loop without nano_loop, and the others in the order of the search.
    rows: list[Row]
    chosen: int  # the row of the chosen options
    seconds: float  # how long the search took
    changes: dict[str, Any] = field(default_factory=dict)  # the options that the search has changed
    remarks: list[str] = field(default_factory=list)  # what to know about the choice
    #: The part of their runnable time that threads waited for CPUs, which other programs used.
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
        yield f"fastest (found in {self.seconds:.0f} s):"
        yield f"  {self.line}"


def _wrapped(text: str, start: str = "") -> str:
    """Return a text in lines that are short enough for a terminal, those after the first below its beginning."""
    indent = " " * len(start)
    return textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=indent, **_WHOLE)


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def as_text(values: Mapping[str, Any]) -> str:
    """Return options as a person writes them, such as ``precision="bf16", channels_last=True``."""
    return ", ".join(f"{name}={_literal(name, value)}" for name, value in values.items())


def differing(options: Options) -> dict[str, Any]:
    """Return the options that are not the default, besides those that only measure, or follow from ``exact``."""
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
    """Raise a NanoConfigError if no picture can be drawn to a path, before it takes minutes to find out."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = 'Run: pip install "nano-loop[plot]"'
        raise NanoConfigError(error_message(f"--plot {path}", "a picture needs matplotlib", hint)) from error
    file = Path(os.path.abspath(path))
    if file.suffix and file.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise _refused(path, f"{file.suffix[1:]} is not one of its formats")
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
    axes.set_xlabel("milliseconds per step (mean and range of two rounds)")
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
