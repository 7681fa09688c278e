"""Binding every thread temporarily: all of them move, and all are restored, whatever happens in between."""

import errno
import os
import threading
import time

import pytest
import torch

from nano_loop.cpu import binding, bound
from nano_loop.errors import NanoError

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="with one CPU no mask can be told from another")

FIRST, SECOND, ALL = {*CPUS[:1]}, {*CPUS[1:2]}, {*CPUS}
NO_CPU = 8191  # above the number of any CPU


class Sleeper:
    """A thread that does nothing until it is told to end."""

    def __init__(self):
        self._told, self._started = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._started.wait()
        self.id = self._thread.native_id

    def _run(self):
        self._started.set()
        self._told.wait()

    @property
    def mask(self):
        return os.sched_getaffinity(self.id)

    def end(self):
        self._told.set()
        self._thread.join()
        while os.path.exists(f"/proc/self/task/{self.id}"):  # Python's part has ended, and the kernel's ends soon
            time.sleep(0.001)


@pytest.fixture
def sleeper():
    """Return a function that starts a thread; all threads end with the test."""
    started = []

    def start():
        started.append(Sleeper())
        return started[-1]

    yield start
    for each in started:
        each.end()


def masks():
    return {int(name): os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")}


# --- which threads are bound ---


def test_threads_are_bound_inside_and_have_their_own_masks_afterwards(sleeper):
    plain, picky = sleeper(), sleeper()
    os.sched_setaffinity(picky.id, SECOND)
    with bound(FIRST):
        assert (plain.mask, picky.mask, os.sched_getaffinity(0)) == (FIRST, FIRST, FIRST)
    assert (plain.mask, picky.mask, os.sched_getaffinity(0)) == (ALL, SECOND, ALL)


def test_openmp_threads_of_torch_are_bound():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1_000_000).sin()  # starts torch's threads, if no earlier test has
        threads = masks()
        assert len(threads) > 1
        with bound(SECOND):
            assert set(map(frozenset, masks().values())) == {frozenset(SECOND)}
            torch.ones(1_000_000).sin()
        assert {thread: mask for thread, mask in masks().items() if thread in threads} == threads
    finally:
        torch.set_num_threads(before)


def test_a_thread_born_inside_gets_a_narrow_mask_of_the_caller_back(sleeper):
    os.sched_setaffinity(0, SECOND)
    try:
        with bound(FIRST):
            born = sleeper()
        assert (born.mask, os.sched_getaffinity(0)) == (SECOND, SECOND)
    finally:
        os.sched_setaffinity(0, ALL)


@pytest.mark.parametrize("name", ["sched_getaffinity", "sched_setaffinity"])
def test_a_thread_that_dies_just_before_it_is_bound_does_no_harm(sleeper, monkeypatch, name):
    mortal, other = sleeper(), sleeper()
    original = getattr(os, name)

    def kill_first(thread, *mask):
        if thread == mortal.id:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        return original(thread, *mask)

    monkeypatch.setattr(os, name, kill_first)
    with bound(FIRST):
        assert other.mask == FIRST
    monkeypatch.undo()
    assert (mortal.mask, other.mask) == (ALL, ALL)


@pytest.mark.parametrize(("when", "mask"), [(FIRST, ALL), (ALL, FIRST)], ids=["bound", "put back"])
def test_a_thread_born_while_others_are_bound_or_put_back_is_bound_and_put_back(sleeper, monkeypatch, when, mask):
    born = []
    original = os.sched_setaffinity

    def bear_first(thread, cpus):
        if set(cpus) == when and not born:
            born.append(sleeper())  # inherits the mask of the calling thread, which is bound last
            assert born[0].mask == mask
        original(thread, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", bear_first)
    with bound(FIRST):
        assert not born or born[0].mask == FIRST
    assert born[0].mask == ALL


# --- bodies that raise, and nested bodies ---


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_masks_are_put_back_when_the_body_raises(sleeper, error):
    other = sleeper()
    with pytest.raises(error, match="mine"), bound(FIRST):
        raise error("mine")
    assert (other.mask, os.sched_getaffinity(0)) == (ALL, ALL)


def test_one_inside_another_gives_back_what_the_outer_one_set(sleeper):
    before = sleeper()
    with bound(FIRST):
        between = sleeper()
        with bound(SECOND):
            within = sleeper()
            assert [each.mask for each in (before, between, within)] == [SECOND] * 3
        assert [each.mask for each in (before, between, within)] == [FIRST] * 3
        assert os.sched_getaffinity(0) == FIRST
    assert [each.mask for each in (before, between, within)] == [ALL] * 3
    assert os.sched_getaffinity(0) == ALL


# --- masks that the kernel rejects ---


def refusing(monkeypatch, refused):
    """Make the kernel reject a mask if ``refused(thread, mask)``, as after a change of the cpuset."""
    original = os.sched_setaffinity

    def set_or_refuse(thread, mask):
        if refused(thread, set(mask)):
            raise OSError(errno.EINVAL, "Invalid argument")
        original(thread, mask)

    monkeypatch.setattr(os, "sched_setaffinity", set_or_refuse)


@pytest.mark.parametrize("cpus", [{NO_CPU}, set()])
def test_a_refused_mask_is_an_error_that_says_what_to_do(cpus):
    with pytest.raises(NanoError) as caught, bound(cpus):
        pytest.fail("the body ran")
    assert isinstance(caught.value.__cause__, OSError)
    assert "Invalid argument" in str(caught.value)
    assert not cpus or str(caught.value).startswith(f"binding to CPUs {NO_CPU}: the kernel refused it")
    assert str(caught.value).endswith("restart the run.")
    assert os.sched_getaffinity(0) == ALL


def test_what_was_bound_before_a_refusal_is_put_back(sleeper, monkeypatch):
    first, last = sorted([sleeper(), sleeper()], key=lambda each: each.id)
    changed = []

    def refused(thread, mask):
        if thread == last.id and mask == FIRST:
            changed.append(first.mask)
            return True
        return False

    refusing(monkeypatch, refused)
    with pytest.raises(NanoError), bound(FIRST):
        pytest.fail("the body ran")
    assert changed == [FIRST]
    assert (first.mask, last.mask, os.sched_getaffinity(0)) == (ALL, ALL, ALL)


def test_a_mask_that_is_not_taken_back_hides_neither_the_bodys_error_nor_other_masks(sleeper, monkeypatch):
    lost, other = sorted([sleeper(), sleeper()], key=lambda each: each.id)
    refusing(monkeypatch, lambda thread, mask: thread == lost.id and mask == ALL)
    with pytest.raises(ValueError, match="mine"), bound(FIRST):
        raise ValueError("mine")
    assert (lost.mask, other.mask, os.sched_getaffinity(0)) == (FIRST, ALL, ALL)
    lost.end()


# --- systems that cannot bind ---


def test_nothing_is_done_where_the_system_has_no_masks(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    with bound(FIRST):
        assert os.sched_getaffinity(0) == ALL


def test_nothing_is_done_where_proc_is_of_another_pid_namespace(monkeypatch, tmp_path, sleeper):
    other = sleeper()
    (tmp_path / str(other.id)).mkdir()
    monkeypatch.setattr(binding, "_TASKS", tmp_path)
    with bound(FIRST):
        assert (other.mask, os.sched_getaffinity(0)) == (ALL, ALL)


def test_an_ended_threads_id_that_another_process_has_now_is_left_alone(sleeper, monkeypatch):
    mortal, other = sleeper(), sleeper()
    touched = []
    original = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, mask: (touched.append(thread), original(thread, mask)))
    with bound(FIRST):
        mortal.end()
        touched.clear()
    assert touched
    assert (other.mask, os.sched_getaffinity(0)) == (ALL, ALL)
    assert mortal.id not in touched
