"""Tables in markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a markdown table."""
    cells = list(head)
    return "\n".join(_line(each) for each in (cells, ["---"] * len(cells), *rows))


def _line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
