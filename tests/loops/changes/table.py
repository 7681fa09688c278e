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
    rounds : bool
        Whether tensors are in bf16 then, so that results may differ as much as two loops by hand do.
    repeats : bool
        Whether other rows cover this one, so that `make test` omits it and its combinations with other options.
    without : tuple of str
        The configs in which the loop by hand would not be equivalent.
    """

    change: Callable
    before: Callable = nullcontext
    is_seen: bool = True
    rounds: bool = False
    repeats: bool = False
    without: tuple = ()


ROWS = {}


def row(**more):
    """Add a function to the table under its name; see `Row`."""

    def add(change):
        add_row(change.__name__.replace("_", " "), Row(change, **more))
        return change

    return add


def add_row(name, new):
    assert name not in ROWS
    ROWS[name] = new
