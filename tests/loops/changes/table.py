"""The table of changes, by name."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple


class Row(NamedTuple):
    """A change that a program makes between two steps.

    Attributes
    ----------
    change : callable
        Modifies the `Program` that it gets.
    before : callable
        Returns a context around the whole run.
    is_seen : bool
        Whether the change affects the results of the plain loop.
    without : tuple of str
        The configs in which the loop by hand would not be equivalent.
    """

    change: Callable
    before: Callable = nullcontext
    is_seen: bool = True
    without: tuple = ()


ROWS = {}


def row(**more):
    """Add a function to the table under its name; see `Row`."""

    def add(change):
        name = change.__name__.replace("_", " ")
        assert name not in ROWS
        ROWS[name] = Row(change, **more)
        return change

    return add
