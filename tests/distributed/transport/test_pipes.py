"""Messages from one rank to another arrive whole and in order, however little room there is on the way."""

import os
from functools import partial

import pytest
import torch

from nano_loop.distributed.ranks import RankLeftError, Ranks
from nano_loop.distributed.transport.allocation import map_together
from nano_loop.distributed.transport.pipes import Pipes
from nano_loop.distributed.transport.shared_segment import SharedSegment
from nano_loop.errors import NanoError

LARGE = 300_001  # elements: several times what a pipe holds


@pytest.fixture
def ends(tmp_path):
    """Both ends of the pipes of two ranks, in one process."""
    segment = SharedSegment(Ranks(), 1, 8, partial(map_together, Ranks(), str(tmp_path)), purpose="exchange values")
    yield [Pipes(Ranks(rank, 2, timeout=0.3), tmp_path, "group", segment, (0, 0)) for rank in range(2)]
    segment.close()


def test_messages_larger_than_the_pipe_arrive_both_ways_in_their_order(ends):
    sent = [[torch.rand(count) for count in (1, LARGE, 0, 65_535, LARGE)] for _ in ends]
    received = [[torch.empty_like(each) for each in some] for some in sent]
    transfers = []
    for rank, end in enumerate(ends):
        transfers += [end.send(each, 1 - rank, 0) for each in sent[rank]]
        transfers += [end.receive(each, 1 - rank, 0) for each in received[1 - rank]]
    assert not all(each.done for each in transfers)
    while not all(each.done for each in transfers):
        for end in ends:
            end.advance()
    for some, others in zip(sent, received, strict=True):
        assert all(map(torch.equal, some, others))


def test_messages_of_other_tags_pass_each_other(ends):
    sender, receiver = ends
    sender.send(torch.ones(3), 1, tag=1)
    sender.send(torch.zeros(2).bool(), 1, tag=2)
    second, first = torch.ones(2).bool(), torch.zeros(4, 3)[:, 1][:3]  # of any strides
    receiver.finish(receiver.receive(second, 0, tag=2))
    receiver.finish(receiver.receive(first, 0, tag=1))
    assert not second.any()
    assert first.tolist() == [1, 1, 1]


def test_tensor_of_another_size_is_refused(ends):
    ends[0].send(torch.ones(3), 1, 0)
    with pytest.raises(
        NanoError, match=r"rank 0 sends 12 bytes to a tensor of 8: .*Receive into a tensor of the shape"
    ):
        ends[1].receive(torch.ones(2), 0, 0)


def test_sender_that_is_late_or_has_left_is_named(ends):
    with pytest.raises(NanoError, match=r"has waited 0.2 seconds for rank 0 to exchange values"):
        _impatient(ends[1]).receive_any(torch.ones(2), 0)
    ends[0].send(torch.ones(1), 1, 0)
    ends[1]._segment.leave(returned=True)
    arrived = torch.zeros(1)
    ends[1].finish(ends[1].receive(arrived, 0, 0))  # it was sent before
    assert arrived.item() == 1
    with pytest.raises(RankLeftError, match="rank 0 has returned from train"):
        ends[1].finish(ends[1].receive(torch.ones(1), 0, 0))


def _impatient(end):
    end._segment._ranks.timeout = 0.2
    return end


def test_files_of_pipes_are_private(ends, tmp_path):
    ends[0].send(torch.ones(3), 1, 0)
    (file,) = tmp_path.glob("pipe-*")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.stat().st_uid == os.geteuid()
