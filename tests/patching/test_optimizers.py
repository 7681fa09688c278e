"""How tensors lie in memory."""

import torch

from nano_loop.patching.objects.optimizers import is_dense, laid_out_as, lies_as


def test_density():
    assert is_dense(torch.ones(2, 3).T)
    assert is_dense(torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last))
    assert not is_dense(torch.ones(3, 1).expand(3, 4))
    assert not is_dense(torch.ones(4, 4)[:, :2])


def test_laid_out_as_keeps_values_and_dtype():
    like = torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)
    value = torch.rand(1, 3, 4, 4).double()
    moved = laid_out_as(like, value)
    assert torch.equal(moved, value)
    assert (moved.stride(), moved.dtype) == (like.stride(), torch.float64)


def test_strides_of_single_elements_do_not_matter():
    one = torch.ones(4, 3, 2, 1).to(memory_format=torch.channels_last)
    assert lies_as(one.as_strided(one.shape, (6, 1, 3, 77)), one)
    assert not lies_as(one.contiguous(), one)
    assert not lies_as(one[:3], one)
    assert not lies_as(one.to_sparse(), one)
