"""A change to the process lasts until its last user has exited, in whatever order they exit."""

import itertools
import threading
from contextlib import contextmanager

import pytest

from nano_loop.patching import patch_table
from nano_loop.patching.patch_table import entry_set, left_by_runs, process_wide, shared_change, users


def test_tables_that_are_not_empty_are_named_with_what_is_in_them(monkeypatch):
    monkeypatch.setattr(patch_table, "_tables", {})
    table = process_wide("a table", {})
    process_wide("an empty one", [])
    with entry_set(table, 1, "one"), entry_set(table, 2, "two"):
        assert left_by_runs() == {"a table": 2}
    assert left_by_runs() == {}


@pytest.fixture
def notes():
    return []


def change(notes):
    @contextmanager
    def make():
        notes.append("made")
        try:
            yield object()
        finally:
            notes.append("undone")

    return make


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_first_user_makes_it_and_the_last_one_undoes_it(notes, order):
    contexts = [shared_change("a key", change(notes)) for _ in range(3)]
    values = [context.__enter__() for context in contexts]
    assert len(set(map(id, values))) == 1
    for left, place in enumerate(order):
        assert users("a key") == 3 - left
        assert notes == ["made"]
        contexts[place].__exit__(None, None, None)
    assert notes == ["made", "undone"]
    assert users("a key") == 0


def test_change_that_cannot_be_made_is_not_there(notes):
    def failing():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), shared_change("a key", failing):
        pass
    assert users("a key") == 0
    with shared_change("a key", change(notes)):
        assert users("a key") == 1


def test_change_may_be_made_of_others(notes):
    @contextmanager
    def outer():
        with shared_change("an inner key", change(notes)):
            yield

    with shared_change("an outer key", outer):
        assert users("an inner key") == 1
    assert notes == ["made", "undone"]


def test_threads_that_come_and_go_make_it_as_often_as_they_undo_it(notes):
    def come_and_go():
        for _ in range(200):
            with shared_change("a key", change(notes)):
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert notes[::2] == ["made"] * (len(notes) // 2)
    assert notes[1::2] == ["undone"] * (len(notes) // 2)
