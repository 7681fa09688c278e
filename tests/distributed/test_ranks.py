"""Values exchanged between ranks arrive complete on all of them."""

import time

import pytest
import torch
from torch import distributed

from nano_loop.distributed.comm.ranks import Ranks, by_host, wait_until
from nano_loop.distributed.launch.group import gradient_group
from nano_loop.errors import NanoError, NanoWorkerError, RankLateError


def test_tensors_travel_whatever_their_layout(team):
    def exchange(ranks):
        tensors = [
            torch.full((2, 3), float(ranks.rank)).t(),
            torch.full((3,), ranks.rank, dtype=torch.bool),
            torch.full((2,), ranks.rank * 1j, dtype=torch.complex64),
            torch.full((2, 3, 4, 4), ranks.rank).contiguous(memory_format=torch.channels_last),
            torch.tensor(ranks.rank, dtype=torch.bfloat16),
            torch.empty(0),
        ]
        ranks.broadcast_tensors(tensors)
        return tensors, ranks.mean(torch.tensor([ranks.rank, 4.0]))

    for tensors, mean in team(2)(exchange):
        assert [tensor.flatten()[:1].tolist() for tensor in tensors] == [[0.0], [False], [0j], [0], [0.0], []]
        assert mean.tolist() == [0.5, 4.0]


def test_ranks_are_grouped_by_host_in_the_order_of_their_first_ranks():
    assert by_host(["b", "a", "b", "c", "a"]) == [[0, 2], [1, 4], [3]]


def test_collective_of_torch_that_is_never_done_has_a_deadline():
    class Never:
        def is_completed(self):
            return False

    with pytest.raises(
        NanoError, match=r"rank 0 has waited 0.2 seconds for the other ranks to join a collective: every"
    ):
        Ranks(0, 2, timeout=0.2).finish(Never())


def test_rank_that_is_late_is_named_also_where_gloo_notices_first(team):
    def wait(ranks):
        ranks = Ranks(ranks.rank, ranks.size, timeout=1.0)
        with gradient_group(ranks):
            if ranks.rank == 1:
                time.sleep(2)
                return None
            work = distributed.all_reduce(torch.ones(4), group=ranks.context.gradient_group, async_op=True)
            time.sleep(0.2)  # the rest of a backward, during the exchange of gradients
            try:
                return ranks.finish(work)
            except RankLateError as error:
                return error.rank, str(error).partition(":")[0]

    assert team(2)(wait)[0] == (1, "rank 0 has waited 1 seconds for the other ranks to join a collective")


def test_what_a_rank_has_sent_before_it_failed_arrives():
    arrived = []

    def send_and_fail():
        arrived.append(1)
        fail()

    def fail():
        raise NanoWorkerError("rank 1 raised", rank=1)

    wait_until(lambda: bool(arrived), send_and_fail)
    with pytest.raises(NanoWorkerError, match="rank 1 raised"):
        wait_until(lambda: False, fail)
