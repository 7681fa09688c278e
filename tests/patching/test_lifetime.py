"""Undo functions end with the user's objects, and keep none of them alive."""

import weakref
from contextlib import ExitStack

import pytest
from torch import nn

from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with, weakly


def test_the_undo_comes_with_the_run_while_the_object_lives():
    undone, owner = [], nn.Linear(1, 1)
    with ExitStack() as undoing:
        undone_with(owner, undoing).callback(undone.append, "run")
        undoing.callback(undone.append, "later change")
    del owner
    assert undone == ["later change", "run"]


def test_a_dictionary_by_identity_calls_no_code_of_its_keys():
    class Raising:
        def __getattr__(self, name):
            raise KeyError(name)

        __eq__ = __hash__ = __bool__ = None

    table, key = WeakIdKeyDictionary(), Raising()
    table[key] = 1
    assert key in table
    assert Raising() not in table
    assert [kept is key for kept in [*table]] == [True]
    del key
    assert len(table) == 0


def test_an_undo_that_raises_does_so_in_the_run():
    owner = nn.Linear(1, 1)
    with pytest.raises(ZeroDivisionError), ExitStack() as undoing:
        undone_with(owner, undoing).callback(lambda: 1 / 0)


def test_a_weak_undo_is_left_out_where_the_object_is_gone():
    seen, owner = [], nn.Linear(1, 1)
    gone, there = weakly(seen.append, nn.Linear(1, 1)), weakly(seen.append, owner)
    gone()
    there()
    assert seen == [owner]
    seen.clear()
    reference = weakref.ref(owner)
    del owner
    assert reference() is None
