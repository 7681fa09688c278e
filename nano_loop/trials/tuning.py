"""What a search has found: every candidate with its times, and the options that it has chosen."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nano_loop.options import Options
from nano_loop.settings import Settings
from nano_loop.trials.candidates import as_text, changed, effective
from nano_loop.trials.live import Measured

_MS, _GIB = 1e3, 1 << 30
_PLAIN, _AS_IT_IS = "plain PyTorch", "as it is"


@dataclass(frozen=True)
class Row:
    """One candidate.

    Attributes
    ----------
    options : dict
        The options of the candidate, besides those that all candidates have.
    plain : bool
        Whether it is the loop without nano_loop.
    milliseconds : float or None
        The median time of a step, for one batch. Several processes take as many batches a step.
    spread : tuple of float, or None
        The quartiles of that time, in milliseconds.
    speed_up : float or None
        How many times as fast as the first row, by turns that both took.
    memory : int or None
        The most memory that the processes of the candidate have had together, in bytes.
    loss, gradients : float or None
        The largest error of the loss and of a gradient, relative to fp64. Of a loop, the loss is the mean square of the
        model's outputs. None where no comparison was made.
    note : str
        Why it was measured no further, or failed.
    """

    options: dict[str, Any]
    plain: bool = False
    milliseconds: float | None = None
    spread: tuple[float, float] | None = None
    speed_up: float | None = None
    memory: int | None = None
    loss: float | None = None
    gradients: float | None = None
    note: str = ""

    @classmethod
    def of(cls, measured: Measured, start: Options) -> Row:
        """Return the row of what was measured, in a search that began with some options."""
        times, comparison = [each * _MS for each in measured.seconds], measured.comparison or {}
        spread = tuple(statistics.quantiles(times, n=4, method="inclusive")[::2]) if len(times) > 1 else None
        return cls(
            options=effective(measured.changes, start) or {},
            plain=measured.is_plain,
            milliseconds=statistics.median(times) if times else None,
            spread=spread,  # type: ignore[arg-type]
            speed_up=measured.speed,
            memory=measured.memory,
            loss=comparison.get("loss"),
            gradients=comparison.get("gradients"),
            note=measured.note,
        )

    @property
    def name(self) -> str:
        """The options as a person writes them."""
        if self.plain:
            return _PLAIN
        return as_text(self.options) or _AS_IT_IS

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        spread = "" if self.spread is None else f" ({self.spread[0]:.3g}–{self.spread[1]:.3g})"
        return (
            "–" if self.milliseconds is None else f"{self.milliseconds:.3g}{spread}",
            "–" if self.speed_up is None else f"{self.speed_up:.2f}×",
            "–" if self.memory is None else f"{self.memory / _GIB:.2f}",
            _error(self.loss),
            _error(self.gradients),
            self.name,
            self.note,
        )


@dataclass
class Tuning:
    """The result of `tune`.

    Attributes
    ----------
    options : dict
        The options to write, chosen ones and those that were given.
    line : str
        The line of code that has them, such as ``@nano(precision="bf16")``.
    rows : list of Row
        The candidates, in the order of the search.
    chosen : int
        The row of the chosen options.
    seconds : float
        How long the search took.
    changes : dict
        The options that the search has changed.
    cached : bool
        Whether all of this was found by an earlier search.
    remarks : list of str
        What to know about the choice.
    """

    options: dict[str, Any]
    line: str
    rows: list[Row]
    chosen: int
    seconds: float
    changes: dict[str, Any] = field(default_factory=dict)
    cached: bool = False
    remarks: list[str] = field(default_factory=list)

    def settings(self, before: Settings) -> Settings:
        """Return the settings of a run with the chosen options."""
        return changed(before, {**self.changes, "tune": False})

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, dicts, strings and numbers, for JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Tuning:
        """Return what `as_dict` has returned."""
        rows = [Row(**{**row, "spread": row["spread"] and tuple(row["spread"])}) for row in content["rows"]]
        return cls(**{**content, "rows": rows})

    def plot(self, path: Any) -> None:
        """Draw the times of the candidates into a file, by matplotlib. Its name says the format, such as ``.png``.

        Parameters
        ----------
        path : str or os.PathLike
            The file.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        from nano_loop.trials.picture import draw

        draw(self, path)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        heads = ("ms a step", "speed", "GiB", "loss", "gradients", "options", "")
        table = [heads, *(row.cells() for row in self.rows)]
        widths = [max(len(cells[place]) for cells in table) for place in range(len(heads))]
        for number, cells in enumerate(table):
            mark = "→" if number == self.chosen + 1 else " "
            padded = (
                cell.ljust(width) if place >= 5 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            yield f"{mark} {'  '.join(padded)}".rstrip()
        yield ""
        yield from self.remarks
        took = "kept from an earlier search" if self.cached else f"found in {self.seconds:.0f} s"
        yield f"fastest ({took}):"
        yield f"  {self.line}"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"
