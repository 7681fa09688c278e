"""The table of changes, by name."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple


class Row(NamedTuple):
    """A change that a program makes between two steps."""

    #: Modifies the `Program` that it gets.
    change: Callable
    #: Returns a context around the whole run.
    before: Callable = nullcontext
    #: Whether the change affects the results of the plain loop.
    is_seen: bool = True
    #: The configs in which the loop by hand would not be equivalent.
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
