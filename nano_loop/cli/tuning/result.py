"""The result of a search: every candidate with its times, and the options that it has chosen."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nano_loop.cli.tuning.candidates import STEPS_BY_DEFAULT
from nano_loop.config.declarations import MEASURING
from nano_loop.config.options import Options
from nano_loop.config.precisions import SHORT_NAMES

_GIB = 1 << 30
_MANY = 3  # steps left out, which the table only counts
_WIDTH = 100  # columns of the text
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # words
_PLAIN, _AS_IT_IS = "plain PyTorch", "as it is"


@dataclass
class Row:
    """One candidate."""

    options: dict[str, Any]  # besides those that all candidates have
    plain: bool = False  # whether it is the loop without nano_loop
    #: The time of a step for one batch, round by round. Several processes take as many batches a step.
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
        """Take the mean of the rounds, as ratios to the options as they are, which run in each round."""
        if not self.seconds or not own.seconds:
            return
        self.milliseconds = 1e3 * statistics.fmean(own.seconds) / statistics.fmean(self._ratios(own))
        if plain.seconds:
            of_plain = statistics.fmean(own.seconds) / statistics.fmean(plain._ratios(own))
            self.speed_up = 1.0 if self.plain else 1e3 * of_plain / self.milliseconds

    def pays(self, own: Row, least: float) -> bool:
        """Whether it is faster than the options as they are in each round, and `least` times on the whole."""
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
        spread = f" ({min(self.seconds) * 1e3:.3g}–{max(self.seconds) * 1e3:.3g})" if len(self.seconds) > 1 else ""
        return (
            "–" if self.milliseconds is None else f"{self.milliseconds:.3g}{spread}",
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
    #: The options as they are, the loop without nano_loop, and the others in the order of the search.
    rows: list[Row]
    chosen: int  # the row of the chosen options
    seconds: float  # how long the search took
    changes: dict[str, Any] = field(default_factory=dict)  # the options that the search has changed
    remarks: list[str] = field(default_factory=list)  # what to know about the choice
    #: The part of their runnable time that threads waited for CPUs, which other programs used.
    waits: float = 0.0
    date: str = ""  # when the search ended

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, dicts, strings and numbers, for JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        heads = ("ms a step", "speed", "GiB", "loss", "gradients", "options")
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
