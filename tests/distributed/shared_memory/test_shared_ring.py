"""The shared-memory transport keeps ranks synchronized, detects when they are not, and leaves nothing behind."""

import gc
import mmap
import os
import random
import resource
import time
from copy import copy
from functools import partial
from pathlib import Path

import pytest
import torch

from distributed.shared_memory.transports import assert_means, opened, values
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.shared_segment import SharedSegment
from nano_loop.errors import NanoError, RankLateError, RankLeftError

KIND = "shared memory"


@pytest.mark.parametrize(("size", "rounds"), [(2, 300), pytest.param(4, 60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_lists_that_all_ranks_have_posted_become_means_without_waiting(team, tmp_path, size, rounds, dtype):
    """Some rank sometimes posts none, so that all ranks average theirs as other lists."""

    def run(ranks):
        transport, naps = opened(KIND, ranks, tmp_path, size=1 << 14), random.Random(ranks.rank)
        means = []
        for turn in range(rounds):
            tensors = [values(turn, ranks.rank, (999, turn % 3), dtype), values(turn, ranks.rank, (7,), dtype)]
            posts = transport.post(None if turn % 7 == 3 * ranks.rank else tensors)
            if naps.random() < 0.1:
                time.sleep(naps.random() / 1000)
            are_posted = ranks.gather(posts)
            (transport.average_posted if all(are_posted) else transport.average)(tensors)
            means.append((are_posted, tensors))
        transport.close()
        return means

    results = team(size)(run)
    for turn, by_rank in enumerate(zip(*results, strict=True)):
        assert by_rank[0][0] == [turn % 7 != 3 * rank for rank in range(size)]
        shapes = (999, turn % 3), (7,)
        lists = [[values(turn, rank, shape, dtype) for shape in shapes] for rank in range(size)]
        assert_means([tensors for _, tensors in by_rank], lists)


def test_lists_of_several_dtypes_or_of_many_bytes_are_not_short(team, tmp_path):
    def run(ranks):
        transport = opened(KIND, ranks, tmp_path, size=1 << 20)
        lists = [torch.zeros(5)], [torch.zeros(5), torch.zeros(5).half()], [torch.zeros((1 << 17) + 1)], []
        are_short = [transport.post(each) for each in lists]
        transport.close()
        return are_short

    assert team(2)(run) == [[True, False, False, False]] * 2


@pytest.mark.parametrize(
    ("size", "rounds"),
    [(2, 2000), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 200), (4, 100), (8, 30)))],
)
def test_thousands_of_rounds_with_random_delays(team, tmp_path, size, rounds):
    def run(ranks):
        transport, naps = opened(KIND, ranks, tmp_path, size=128), random.Random(ranks.rank)
        wrong = []
        for turn in range(rounds):
            length = (turn * 37) % 200
            tensor = torch.full((length,), float(turn + ranks.rank))
            if naps.random() < 0.05:
                time.sleep(naps.random() / 1000)
            transport.average([tensor, tensor.new_full((turn % 5,), turn * 2.0)])
            wrong += [turn] * (not tensor.eq(turn + (ranks.size - 1) / 2).all())
        transport.close()
        return wrong

    assert team(size)(run) == [[]] * size


def test_more_lists_than_plans_are_kept(team, tmp_path):
    def run(ranks):
        transport, wrong = opened(KIND, ranks, tmp_path), []
        for length in [*range(150), *range(150)]:
            tensor = torch.full((length,), float(ranks.rank))
            transport.average([tensor])
            wrong += [length] * (not tensor.eq(0.5).all())
        transport.close()
        return wrong

    assert team(2)(run) == [[], []]


def test_a_rank_that_arrives_and_leaves_between_two_looks_is_no_fault(tmp_path):
    ranks = Ranks()
    segment = SharedSegment(ranks, 1, 8, partial(mmap.mmap, -1))
    (place,) = segment.places(0)

    def arrive_and_leave():
        segment.publish(place, 1)
        segment.leave()

    ranks.check = arrive_and_leave
    segment.wait([place], 1)
    with pytest.raises(NanoError, match="rank 0 has returned from train"):
        segment.wait([place], 2)
    segment.close()


def test_rank_of_another_host_that_is_late_or_leaves_is_known_by_its_number_in_the_run():
    segment = SharedSegment(Ranks(6, 7, timeout=0.1).group([4, 6]), 1, 8, partial(mmap.mmap, -1))
    with pytest.raises(RankLateError, match=r"rank 6 has waited 0.1 seconds for rank 4") as late:
        segment.wait(segment.places(0), 1)
    segment.publish(segment.places(1)[0], 1)
    with pytest.raises(RankLeftError, match="rank 4 has returned from train") as left:
        segment.wait(segment.places(0), 1)
    assert (late.value.rank, left.value.rank) == (4, 4)
    segment.close()


def test_what_check_raises_ends_the_wait_and_the_transport(team, tmp_path):
    def run(ranks):
        watched, transport = copy(ranks), None

        def check():
            raise KeyError("rank 1 failed")

        transport = opened(KIND, watched, tmp_path)
        transport.average([torch.ones(3)])
        watched.check = check
        if ranks.rank == 0:
            with pytest.raises(KeyError, match="rank 1 failed"):
                transport.average([torch.ones(3)])
            with pytest.raises(NanoError, match="the ranks are out of step"):
                transport.average([torch.ones(3)])
        ranks.barrier()
        transport.close()

    team(2)(run)


def test_nothing_is_left_and_nothing_is_held_after_close(team, tmp_path):
    def mapped():
        return sum("averaging-" in line for line in Path("/proc/self/maps").read_text().splitlines())

    def run(ranks):
        counts = []
        for _ in range(3):
            descriptors, before = len(os.listdir("/proc/self/fd")), mapped()
            transport = opened(KIND, ranks, tmp_path)
            ranks.barrier()  # rank 0 removes the file before this barrier
            files, held = list(tmp_path.iterdir()), mapped()
            gc.disable()  # resources must be released without the garbage collector
            try:
                for length in (10, 5000):
                    transport.average([torch.ones(length), torch.ones(3, dtype=torch.bfloat16)])
                transport.close()
                counts.append((files, before, held, mapped(), len(os.listdir("/proc/self/fd")) - descriptors))
            finally:
                gc.enable()
        return counts

    assert team(2)(run) == [[([], 0, 1, 0, 0)] * 3] * 2


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("room", "[Errno 27] File too large"),
        ("a folder", "[Errno 2] No such file"),
        ("addresses", "no address"),
    ],
)
def test_memory_that_is_not_to_be_had_is_an_error(monkeypatch, tmp_path, lacking, reason):
    def refuse(*args):
        raise OSError("no address space")

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if lacking == "room":  # fails like a full file system, without mounting one
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    if lacking == "addresses":
        monkeypatch.setattr(mmap, "mmap", refuse)
    try:
        with pytest.raises(NanoError) as caught:
            opened(KIND, Ranks(), tmp_path / "absent" if lacking == "a folder" else tmp_path, size=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    message = str(caught.value)
    assert message.startswith(f"6 MiB of shared memory in {tmp_path}")
    assert f" could not be allocated ({reason}" in message
    assert message.endswith("--shm-size=1g.")
    assert list(tmp_path.iterdir()) == []


def test_all_memory_is_there_before_it_is_used(team, tmp_path):
    def run(ranks):
        sizes = []
        if ranks.rank == 0:
            original = os.unlink

            def look(path):
                status = os.stat(path)
                sizes.append((status.st_blocks * 512 >= status.st_size >= 9 << 20, oct(status.st_mode & 0o777)))
                original(path)

            os.unlink = look
        try:
            opened(KIND, ranks, tmp_path, size=1 << 20).close()
        finally:
            if ranks.rank == 0:
                os.unlink = original
        return sizes

    of_rank_0, of_rank_1 = team(2)(run)
    assert ({*of_rank_0}, of_rank_1) == ({(True, "0o600")}, [])
