"""Averaging within hosts and then between them gives the means over all ranks, the same to the bit everywhere."""

import errno
import os
import sys
import time
import weakref
from contextlib import nullcontext
from unittest import mock

import cloudpickle
import pytest
import torch
from torch import distributed

from distributed.shared_memory import transports
from distributed.shared_memory.transports import assert_means, random_list, same_bits, values
from nano_loop.distributed.comm.ranks import Hosts, by_host
from nano_loop.distributed.multi_host.hosts import HostsTransport
from nano_loop.distributed.shared_memory import shared_file
from nano_loop.errors import NanoError

cloudpickle.register_pickle_by_value(transports)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CHUNK = 512  # bytes that travel at once, so that small lists make many batches
EVEN, ODD, ALONE = ((0, 1), (2, 3)), ((0, 1), (2,)), ((0,), (1,), (2,))
divisions = pytest.mark.parametrize("members", [pytest.param(EVEN, marks=pytest.mark.slow), ODD, ALONE])


class Placed:
    """A transport between hosts that are folders, for one rank of a team."""

    def __init__(self, ranks, folder, members, **options):
        own = next(number for number, each in enumerate(members) if ranks.rank in each)
        self.leaders = distributed.new_group([each[0] for each in members], backend="gloo")
        alone = len(members[own]) == 1
        self.hosts = Hosts(members, own, None if alone else folder / f"host-{own}", self.leaders)
        self.transport = HostsTransport(ranks, self.hosts, **{"chunk": CHUNK, **options})

    def __enter__(self):
        return self.transport

    def __exit__(self, *_):
        self.transport.leave()
        self.transport.close()
        if self.hosts.here[0] == distributed.get_rank():
            distributed.destroy_process_group(self.leaders)


@pytest.fixture
def folders(tmp_path):
    for number in range(3):
        (tmp_path / f"host-{number}").mkdir(mode=0o700)
    return tmp_path


def size(members):
    return sum(map(len, members))


def test_ranks_are_grouped_by_host_in_the_order_of_their_first_ranks():
    assert by_host(["b", "a", "b", "c", "a"]) == [[0, 2], [1, 4], [3]]


@divisions
def test_random_lists_become_their_means(team, folders, members):
    def run(ranks):
        with Placed(ranks, folders, members) as transport:
            lists = [random_list(seed, ranks.rank) for seed in range(20)]
            for each in lists:
                transport.average(each)
            return lists

    by_rank = team(size(members))(run)
    for seed in range(20):
        assert_means([results[seed] for results in by_rank], [random_list(seed, rank) for rank in range(size(members))])
    assert not [path for path in folders.rglob("*") if path.is_file()]


def test_group_between_hosts_ends_with_the_transport_that_used_it_wherever_that_is_held(team, folders):
    def run(ranks):
        with Placed(ranks, folders, ALONE) as transport:
            transport.average([torch.ones(3)])
            group = weakref.ref(transport._mean._group)
        return group() is None

    assert team(3)(run) == [True] * 3


@pytest.mark.slow
def test_equal_tensors_stay_what_they_are(team, folders):
    mine = [values(3, 0, (999,), dtype) for dtype in (torch.float32, torch.bfloat16)]

    def run(ranks):
        with Placed(ranks, folders, EVEN) as transport:
            tensors = [each.clone() for each in mine]
            transport.average(tensors)
            return tensors

    for got in team(4)(run):
        assert all(map(same_bits, got, mine))


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_one_rank_without_room_is_an_error_on_every_rank_at_once(team, folders, failing):
    def run(ranks):
        raising = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        failed = mock.patch.multiple(shared_file, make=raising, map_whole=raising)
        begun = time.monotonic()
        try:
            with failed if ranks.rank == failing else nullcontext(), Placed(ranks, folders, ((0,), (1, 2, 3))):
                return "made"
        except NanoError as error:
            waited = time.monotonic() - begun
            return str(error) if waited < ranks.timeout / 2 else f"after {waited:.0f} s"

    expected = "made" if failing == 0 else "could not be allocated"  # rank 0 is alone on its host
    assert all(expected in outcome for outcome in team(4)(run))
    assert not any(path.name.startswith("averaging") for path in folders.rglob("*"))


def test_host_without_room_is_an_error_on_every_rank(team, folders):
    (folders / "host-1").rmdir()

    def run(ranks):
        try:
            with Placed(ranks, folders, ((0,), (1, 2))):
                return "made"
        except NanoError as error:
            return str(error)

    for said in team(3)(run):
        assert "could not be allocated" in said
