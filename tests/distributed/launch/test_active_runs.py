"""Of the runs in one process, whatever their thread, only one at a time has the process group and binds all threads."""

import os
import threading

import pytest
from leaks import affinity_masks
from torch import distributed, nn

from distributed import small
from nano_loop import NanoError, nano

pytestmark = pytest.mark.usefixtures("nothing_left")
on_lists = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")


def in_threads(*runs):
    """Call each run in its own thread, all concurrently, and return the result or the error of each."""
    results = [None] * len(runs)
    together = threading.Barrier(len(runs))

    def call(number):
        together.wait()
        try:
            results[number] = runs[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,), name=f"run {number}") for number in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_two_threads_that_start_two_processes_one_is_refused_by_name():
    before = affinity_masks()
    results = in_threads(*[lambda: nano(**small.OPTIONS)(small.fit)(*small.parts()) for _ in range(2)])
    (steps,) = (each for each in results if not isinstance(each, Exception))
    (error,) = (each for each in results if isinstance(each, Exception))
    assert steps == 8
    assert type(error) is NanoError
    started, refused = (f"run {number}" for number in ((0, 1) if results[1] is error else (1, 0)))
    assert f"num_processes=2 in thread {refused!r}" in str(error)
    assert f"thread {started!r} is in a run of 2 processes" in str(error)
    after = affinity_masks()
    assert {thread: after.get(thread) for thread in before} == before
    assert not distributed.is_initialized()


class Overlapping:
    """Two runs in two threads: the second begins during the first, and they end in the given order."""

    def __init__(self, first, second, first_ends_first):
        self.first_is_in, self.first_may_end, self.second_may_end = (threading.Event() for _ in range(3))
        self.first, self.second, self.first_ends_first = first, second, first_ends_first

    def run(self):
        return in_threads(self._run_first, self._run_second)

    def _run_first(self):
        def train(model):
            self.first_is_in.set()
            self.first_may_end.wait(60)
            return small.mask()

        try:
            return nano(**self.first, verbose=False)(train)(nn.Linear(1, 1))
        finally:
            self.first_is_in.set()
            self.second_may_end.set()

    def _run_second(self):
        def train(model):
            if self.first_ends_first:
                self.first_may_end.set()
                self.second_may_end.wait(60)
            return small.mask()

        self.first_is_in.wait(60)
        try:
            return nano(**self.second, verbose=False)(train)(nn.Linear(1, 1))
        finally:
            self.first_may_end.set()


@on_lists
@pytest.mark.parametrize("first_ends_first", [True, False])
def test_plain_run_beside_one_that_has_the_process_is_left_alone(first_ends_first):
    before = affinity_masks()
    cpus = small.mask()
    first, second = Overlapping({"cpu_for_each_process": [[cpus[0]]]}, {}, first_ends_first).run()
    after = affinity_masks()
    assert {thread: after.get(thread) for thread in before} == before
    assert first == [cpus[0]]
    assert second in ([cpus[0]], cpus)


@on_lists
def test_run_on_cpus_of_its_own_inside_another_is_nested():
    cpus = small.mask()

    def inner(model):
        return small.mask()

    def outer(model):
        inside = nano(cpu_for_each_process=[[cpus[-1]]], verbose=False)(inner)(model)
        return inside, small.mask()

    assert nano(cpu_for_each_process=[cpus], verbose=False)(outer)(nn.Linear(1, 1)) == ([cpus[-1]], cpus)
    assert small.mask() == cpus


@pytest.mark.parametrize("ending", [ValueError, SystemExit, KeyboardInterrupt])
def test_process_is_free_again_however_a_run_has_ended(ending):
    def fail(model):
        raise ending

    for _ in range(2):
        with pytest.raises(ending):
            nano(cpu_for_each_process=[small.mask() or [0]], verbose=False)(fail)(nn.Linear(1, 1))
    (mask,) = in_threads(lambda: nano(cpu_for_each_process=[small.mask()], verbose=False)(same_mask)(nn.Linear(1, 1)))
    assert mask == small.mask()


def same_mask(model):
    return small.mask()
