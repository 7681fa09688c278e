"""Ranks that wait for each other are detected, and ranks that only seem to are not."""

import threading

import pytest

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.shared_memory import deadlocks as module
from nano_loop.distributed.shared_memory.deadlocks import Waits


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Make each look record and count immediately, without a wait of a second."""
    monkeypatch.setattr(module, "_LONG", 0.0)
    monkeypatch.setattr(module, "_EVERY", 0.0)


@pytest.fixture
def ranks(tmp_path):
    return [Waits(rank, tmp_path) for rank in range(3)]


def look(*waits, times=4):
    """Let the waits look in turn, and return their last results."""
    return [[wait.look() for wait in waits] for _ in range(times)][-1]


def test_two_ranks_that_wait_for_each_other_are_found_by_the_lower_one(ranks):
    first, second = ranks[1].begin(2, AVERAGING), ranks[2].begin(1, "barrier")
    found, nothing = look(first, second)
    assert {rank: where.what for rank, where in found.items()} == {1: AVERAGING, 2: "barrier"}
    assert __file__ in found[2].line
    assert nothing == {}


# Who waits for whom, the order of the looks, and the waits that detect the cycle at their last look.
BOTH = [(0, 1), (1, 0)]
LOOKS = {
    "a ring of three": ([(0, 2), (1, 0), (2, 1)], "012" * 4, [0]),
    "ranks that wait for one that works": ([(0, 2), (1, 2)], "01" * 9, []),
    "a rank outside the ring": ([(0, 1), (1, 2), (2, 1)], "012" * 4, [1]),
    "a rank that has not run since": (BOTH, "1" + "0" * 50, []),
    "a rank that has counted once since, and may have looked before": (BOTH, "101" + "0" * 50, []),
    "a rank that has counted twice since": (BOTH, "101" + "0" * 50 + "1" + "0" * 4, [0]),
}


@pytest.mark.parametrize("name", LOOKS)
def test_ring_is_found_by_its_lowest_rank_once_all_of_it_have_looked_again(ranks, name):
    waits, looks, expected = LOOKS[name]
    begun = [ranks[rank].begin(other, "a") for rank, other in waits]
    found = {number: bool(begun[number].look()) for number in map(int, looks)}
    assert [number for number in sorted(found) if found[number]] == expected


def test_a_wait_that_is_over_is_no_deadlock(ranks):
    first, second = ranks[0].begin(1, "a"), ranks[1].begin(0, "b")
    second.look()
    first.look()
    second.end()
    assert look(first, times=50) == [{}]
    again = ranks[1].begin(0, "c")  # a new wait, unseen by the first look
    again.look()
    first.look()
    again.look()
    assert first.look() == {}
    again.look()
    assert first.look()


def test_nothing_is_written_down_of_a_rank_that_waits_in_two_threads(ranks):
    first, second = ranks[0].begin(1, "a"), ranks[1].begin(0, "b")
    first.look()
    thread = threading.Thread(target=ranks[0].begin(2, "c").look)
    thread.start()
    thread.join()
    assert look(first, second, times=9) == [{}, {}]
    assert ranks[1].note_of(0) is None


def test_a_short_wait_is_not_written_down(ranks, monkeypatch):
    monkeypatch.setattr(module, "_LONG", 60.0)
    wait = ranks[0].begin(1, "a")
    wait.look()
    wait.end()
    assert ranks[1].note_of(0) is None


def test_without_a_folder_ranks_wait_as_before(tmp_path):
    first, second = (Waits(rank, tmp_path / "gone") for rank in range(2))
    waits = first.begin(1, "a"), second.begin(0, "b")
    assert look(*waits, times=9) == [{}, {}]
    for each in waits:
        each.end()
