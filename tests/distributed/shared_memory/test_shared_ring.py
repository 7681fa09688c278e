"""The shared-memory transport keeps ranks in step, tells them when they are not, and leaves nothing behind."""

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

from distributed.shared_memory.transports import opened
from nano_loop.distributed.comm.packing import pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.shared_ring import LocalShard
from nano_loop.distributed.shared_memory.shared_segment import SharedSegment
from nano_loop.errors import NanoError, RankLateError, RankLeftError

KIND = "shared memory"


def message(transport, tensors):
    """What a NanoError of averaging `tensors` says; None where there is none."""
    try:
        transport.average(tensors)
    except NanoError as error:
        return str(error)
    return None


def outcome(ranks, folder, **options):
    """What a NanoError of making a transport says; None where there is none."""
    try:
        opened(KIND, ranks, folder, **options).close()
    except NanoError as error:
        return str(error)
    return None


def with_timeout(ranks, seconds):
    impatient = copy(ranks)
    impatient.timeout = seconds
    return impatient


# --- in step ---


@pytest.mark.parametrize(
    ("size", "slots", "rounds"),
    [(2, 3, 2000), (2, 2, 300), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 3, 200), (4, 4, 100)))],
)
def test_thousands_of_rounds_with_random_delays(team, tmp_path, size, slots, rounds):
    def run(ranks):
        transport, naps = opened(KIND, ranks, tmp_path, size=128, slots=slots), random.Random(ranks.rank)
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


# --- out of step ---


def test_a_rank_that_left_is_named(team, tmp_path):
    def run(ranks):
        transport = opened(KIND, ranks, tmp_path)
        results = [message(transport, [torch.ones(1000)]) for _ in range(20)]
        said = None
        if ranks.rank == 1:
            transport.leave()
        else:
            said = message(transport, [torch.ones(1000)])
        transport.close()
        return results, said

    (results, said), (others, _) = team(2)(run)
    assert results == others == [None] * 20
    assert said.startswith("rank 1 has returned from train, and rank 0 still averages gradients: all ranks must")


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


@pytest.mark.slow
def test_a_late_rank_is_named_after_the_timeout(team, tmp_path):
    def run(ranks):
        transport = opened(KIND, with_timeout(ranks, 0.2), tmp_path)
        transport.average([torch.ones(3)])
        said = message(transport, [torch.ones(3)]) if ranks.rank != 1 else None
        ranks.barrier()
        transport.close()
        return said

    said = team(3)(run)
    for rank in (0, 2):
        assert said[rank].startswith(f"rank {rank} has waited 0.2 seconds for rank 1 to average gradients: ")


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


# --- the file ---


def test_nothing_is_left_and_nothing_is_held_after_close(team, tmp_path):
    def mapped():
        return sum("averaging-" in line for line in Path("/proc/self/maps").read_text().splitlines())

    def run(ranks):
        counts = []
        for _ in range(3):
            descriptors, before = len(os.listdir("/proc/self/fd")), mapped()
            transport = opened(KIND, ranks, tmp_path)
            ranks.barrier()  # until then rank 0 may not have come to removing it
            files, held = list(tmp_path.iterdir()), mapped()
            gc.disable()  # what is given back has to be so at once
            try:
                for length in (10, 5000):
                    transport.average([torch.ones(length), torch.ones(3, dtype=torch.bfloat16)])
                transport.close()
                counts.append((files, before, held, mapped(), len(os.listdir("/proc/self/fd")) - descriptors))
            finally:
                gc.enable()
        return counts

    assert team(2)(run) == [[([], 0, 1, 0, 0)] * 3] * 2


@pytest.mark.parametrize("lacking", ["room", "a folder", "addresses on a rank"])
def test_memory_that_is_not_to_be_had_is_an_error_on_every_rank(team, tmp_path, lacking):
    def refuse(*args):
        raise OSError("no address space")

    def run(ranks):
        limit, original = resource.getrlimit(resource.RLIMIT_FSIZE), mmap.mmap
        if lacking == "room" and ranks.rank == 0:  # what a full file system answers, without mounting one
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
        if lacking == "addresses on a rank" and ranks.rank == 1:
            mmap.mmap = refuse
        try:
            return outcome(ranks, tmp_path / "absent" if lacking == "a folder" else tmp_path, size=1 << 20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            mmap.mmap = original

    reasons = {
        "room": "[Errno 27] File too large",
        "a folder": "[Errno 2] No such file",
        "addresses on a rank": "no address",
    }
    for said in team(2)(run):
        assert said.startswith(f"9 MiB of shared memory in {tmp_path}")
        assert f" could not be allocated ({reasons[lacking]}" in said
        assert said.endswith("--shm-size=1g.")
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


# --- the slice of a batch that a rank sums: into its tensors and into the result, and nowhere else ---

LENGTH = 40


def tensors_of(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((3, 4), (), (20,), (7,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_slice_is_the_mean_in_the_order_of_ranks(size, dtype):
    lists = [tensors_of(rank, dtype) for rank in range(size)]
    (batch,) = pack(signature(lists[0]), 1 << 10)
    assert batch.length == LENGTH
    flat = [torch.cat([each.flatten() for each in tensors]) for tensors in lists]
    total = flat[0].clone()
    for each in flat[1:]:
        total += each
    for rank in range(size):
        start, stop = 5, 30  # in the middle of the first and of the third tensor
        rows = torch.stack([*flat, torch.full((LENGTH,), -1.0, dtype=dtype)])
        rows[rank].fill_(torch.nan)  # this rank's own gradients come from its tensors
        mine, result = [each.clone() for each in lists[rank]], rows[-1]
        LocalShard(batch, start, stop, rank, rows).average(mine)
        expected = flat[rank].clone()
        expected[start:stop] = (total / size)[start:stop]
        assert torch.equal(torch.cat([each.flatten() for each in mine]), expected)
        assert torch.equal(result[start:stop], expected[start:stop])
        assert result[:start].eq(-1).all()
        assert result[stop:].eq(-1).all()


def test_an_empty_slice_changes_nothing():
    tensors = tensors_of(0, torch.float32)
    (batch,) = pack(signature(tensors), 1 << 10)
    LocalShard(batch, LENGTH, LENGTH, 1, torch.zeros(3, LENGTH)).average(tensors)
    assert all(map(torch.equal, tensors, tensors_of(0, torch.float32)))
