"""The table of changes, by their names."""

from collections.abc import Callable
from typing import NamedTuple


class Row(NamedTuple):
    """A change that a program makes between two steps.

    Attributes
    ----------
    name : str
        What is changed.
    change : callable
        Takes a `Program`, and changes it.
    without : frozenset of str
        The configs whose loop by hand would compute something else.
    """

    name: str
    change: Callable
    without: frozenset


ROWS = {}


def row(*without):
    """Add a function to the table; see `Row`."""

    def add(change):
        name = change.__name__.replace("_", " ")
        assert name not in ROWS
        ROWS[name] = Row(name, change, frozenset(without))
        return change

    return add
