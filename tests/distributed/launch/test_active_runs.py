"""Of the runs in one process, whatever their thread, only one at a time has the process group and binds all threads.

tests/faults starts two such runs at once, and others after runs that have failed.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from leaks import affinity_masks
from torch import nn

from distributed import small
from nano_loop import nano

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks"),
]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_plain_run_beside_one_that_has_the_process_is_left_alone(first_ends_first):
    before, cpus = affinity_masks(), small.mask()
    first_is_in, first_may_end, second_may_end = (threading.Event() for _ in range(3))

    def first(model):
        first_is_in.set()
        first_may_end.wait(60)
        return small.mask()

    def second(model):
        if first_ends_first:
            first_may_end.set()
            second_may_end.wait(60)
        return small.mask()

    def run_first():
        mask = nano(cpu_for_each_process=[cpus[:1]], verbose=False)(first)(nn.Linear(1, 1))
        second_may_end.set()
        return mask

    def run_second():
        first_is_in.wait(60)
        mask = nano(verbose=False)(second)(nn.Linear(1, 1))
        first_may_end.set()
        return mask

    with ThreadPoolExecutor(2) as pool:
        of_first, of_second = pool.submit(run_first), pool.submit(run_second)
    after = affinity_masks()
    assert {thread: after.get(thread) for thread in before} == before
    assert of_first.result() == cpus[:1]
    assert of_second.result() in (cpus[:1], cpus)


def test_run_on_cpus_of_its_own_inside_another_is_nested():
    cpus = small.mask()

    def inner(model):
        return small.mask()

    def outer(model):
        inside = nano(cpu_for_each_process=[[cpus[-1]]], verbose=False)(inner)(model)
        return inside, small.mask()

    assert nano(cpu_for_each_process=[cpus], verbose=False)(outer)(nn.Linear(1, 1)) == ([cpus[-1]], cpus)
    assert small.mask() == cpus
