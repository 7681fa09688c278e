"""A gradient travels as plain memory in the order of its parameter's."""

import pytest
import torch
from torch import nn

from nano_loop.distributed.data_parallel.gradients import DenseGradients

VALUES = torch.arange(6.0).view(2, 3)
GRADIENTS = {
    "contiguous": VALUES,
    "transposed": VALUES.t().contiguous().t(),
    "negative": (VALUES * -1j).conj().imag,
    "sparse": VALUES.to_sparse(),
}


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_in_the_order_of_the_parameter_s_memory(gradient, transposed):
    zeros = torch.zeros(3, 2).t() if transposed else torch.zeros(2, 3)
    parameter = nn.Parameter(zeros)
    parameter.grad = gradient.clone()
    (given,) = DenseGradients([parameter]).tensors
    assert given.flatten().tolist() == (VALUES.t() if transposed else VALUES).flatten().tolist()
    assert given.is_contiguous()
    assert not given.is_neg()


def test_what_fits_is_averaged_where_it_lies():
    parameter = nn.Parameter(torch.zeros(3, 2).t())
    parameter.grad = torch.ones(3, 2).t()
    assert DenseGradients([parameter]).tensors[0].data_ptr() == parameter.grad.data_ptr()
