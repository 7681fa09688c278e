"""Lists of tensors are cut into batches that hold each element once and no more bytes than they may."""

import pytest
import torch

from distributed.shared_memory.transports import DTYPES, random_list
from nano_loop.distributed.comm.packing import pack, signature

CAPACITY = 512


def packed(tensors):
    return pack(signature(tensors), CAPACITY)


@pytest.mark.parametrize("seed", range(30))
def test_each_element_is_in_one_batch(seed):
    tensors = random_list(seed, 0)
    packing, seen = packed(tensors), [torch.zeros(each.numel(), dtype=torch.int) for each in tensors]
    for batch in packing:
        assert 0 < batch.nbytes <= CAPACITY
        offset = 0
        for piece in batch.pieces:
            assert piece.offset == offset
            offset += piece.shape.numel()
            seen[piece.index][piece.bounds or slice(None)] += 1
        assert offset == batch.length
    assert all(each.eq(1).all() for each in seen)


def test_small_tensors_stay_whole_and_large_ones_fill_batches_up():
    packing = packed([torch.empty(100), torch.empty(100), torch.empty(300)])
    assert [batch.length for batch in packing] == [100, 128, 128, 128, 16]
    assert {piece.index for batch in packing for piece in batch.pieces if piece.bounds} == {2}


def test_dtypes_travel_apart():
    tensors = [torch.empty(3, dtype=dtype) for dtype in (*DTYPES, *DTYPES)]
    assert [batch.dtype for batch in packed(tensors)] == [*DTYPES]


@pytest.mark.parametrize("seed", range(10))
def test_what_lies_between_two_elements_is_cut_there_and_nothing_is_lost(seed):
    tensors = random_list(seed, 0)
    for batch in packed(tensors):
        elements = torch.arange(batch.length)
        whole = [(each.index, each.bounds, each.offset) for each in batch.pieces]
        assert [(each.index, each.bounds, each.offset) for each in batch.between(0, batch.length)] == whole
        for start, stop in ((0, batch.length // 3), (batch.length // 3, batch.length), (batch.length, batch.length)):
            found = batch.between(start, stop)
            covered = [elements[each.offset : each.offset + each.shape.numel()] for each in found]
            assert torch.equal(torch.cat([elements[:0], *covered]), elements[start:stop])
            for piece in found:
                of_whole = next(each for each in batch.pieces if each.index == piece.index)
                first = (of_whole.bounds.start if of_whole.bounds else 0) + piece.offset - of_whole.offset
                assert piece is of_whole or piece.bounds == slice(first, first + piece.shape.numel())
