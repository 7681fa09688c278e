"""A rank's slice of a batch is summed in the order of ranks, into its tensors and into the result, and nowhere else."""

import pytest
import torch

from nano_loop.distributed.comm.packing import pack, signature
from nano_loop.distributed.shared_memory.shared_ring import LocalShard

LENGTH = 40


def tensors_of(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((3, 4), (), (20,), (7,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_slice_is_the_mean_in_the_order_of_ranks(size, dtype):
    lists = [tensors_of(rank, dtype) for rank in range(size)]
    (batch,) = pack(signature(lists[0]), 1 << 10).batches
    assert batch.length == LENGTH
    flat = [torch.cat([each.flatten() for each in tensors]) for tensors in lists]
    total = flat[0].clone()
    for each in flat[1:]:
        total += each
    for rank in range(size):
        start, stop = 5, 30  # in the middle of the first and of the third tensor
        slots, result = [each.clone() for each in flat], torch.full((LENGTH,), -1.0, dtype=dtype)
        slots[rank].fill_(torch.nan)  # this rank's own gradients never are in shared memory
        mine = [each.clone() for each in lists[rank]]
        LocalShard(batch, start, stop, rank, slots, result).average(mine, {0: mine[0].view(-1), 2: mine[2]})
        expected = flat[rank].clone()
        expected[start:stop] = (total / size)[start:stop]
        assert torch.equal(torch.cat([each.flatten() for each in mine]), expected)
        assert torch.equal(result[start:stop], expected[start:stop])
        assert result[:start].eq(-1).all()
        assert result[stop:].eq(-1).all()


def test_an_empty_slice_changes_nothing():
    tensors = tensors_of(0, torch.float32)
    (batch,) = pack(signature(tensors), 1 << 10).batches
    slots, result = [torch.zeros(LENGTH), torch.zeros(LENGTH)], torch.zeros(LENGTH)
    LocalShard(batch, LENGTH, LENGTH, 1, slots, result).average(tensors, {})
    assert all(map(torch.equal, tensors, tensors_of(0, torch.float32)))
