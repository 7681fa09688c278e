"""The table of changes, by their names."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple


class Row(NamedTuple):
    """A change that a program makes between two steps.

    Attributes
    ----------
    change : callable
        Takes a `Program`, and changes it.
    before : callable
        Returns a context around the whole run.
    is_seen : bool
        Whether the plain loop computes something else for it.
    rounds : bool
        Whether tensors are in bf16 then, so that results may be as far apart as two loops by hand.
    repeats : bool
        Whether other rows show the like, so that `make test` leaves it out, and the crossing with other options.
    without : tuple of str
        The configs whose loop by hand would not be the same.
    """

    change: Callable
    before: Callable = nullcontext
    is_seen: bool = True
    rounds: bool = False
    repeats: bool = False
    without: tuple = ()


ROWS = {}


def row(**more):
    """Add a function to the table, under its name; see `Row`."""

    def add(change):
        add_row(change.__name__.replace("_", " "), Row(change, **more))
        return change

    return add


def add_row(name, new):
    assert name not in ROWS
    ROWS[name] = new
