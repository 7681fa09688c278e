"""Ranks whose parameters differ are reported with the parameter's name; rounding is not reported."""

import pytest
import torch

from nano_loop.distributed.data_parallel.checksums import checksums, refuse_unequal
from nano_loop.errors import NanoWorkerError

NAN, INF = float("nan"), float("inf")


def refuse(*by_rank):
    named = [(f"Net.{number}", tensor) for number, tensor in enumerate(by_rank[0])]
    refuse_unequal([checksums(each) for each in by_rank], named)


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in [(300, 40), (40,), ()]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_equal_parameters_pass_and_another_row_is_named(dtype):
    refuse(tensors(dtype), tensors(dtype))
    other = tensors(dtype)
    other[0][0] += 5
    with pytest.raises(
        NanoWorkerError, match=r"Net\.0 is not the same on all ranks: its norm is .* on rank 1"
    ) as caught:
        refuse(tensors(dtype), other)
    assert caught.value.rank == 1


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
DTYPES = [each for each in DTYPES if not str(each).startswith("torch.q")]  # without quantized dtypes


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_are_compared(dtype):
    zeros, ones, again = (torch.empty(8, 8, dtype=dtype) for _ in range(3))
    for tensor, value in ((zeros, 0), (ones, 1), (again, 1)):
        tensor.view(torch.uint8).fill_(value)
    refuse([ones], [again])
    with pytest.raises(NanoWorkerError, match=r"Net\.0 "):
        refuse([ones], [zeros])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_differ_by_rounding_pass(dtype):
    signs = torch.Generator().manual_seed(1)
    ulps = [torch.randint(-1, 2, each.shape, generator=signs) * torch.finfo(dtype).eps for each in tensors(dtype)]
    rounded = [each * (1 + ulp.to(dtype)) for each, ulp in zip(tensors(dtype), ulps, strict=True)]
    assert not torch.equal(rounded[0], tensors(dtype)[0])
    refuse(tensors(dtype), rounded)


def test_parameters_of_one_norm_and_other_sums_are_named():
    with pytest.raises(NanoWorkerError, match=r"Net\.1 .*its sum is 3 on rank 0, and -3 on rank 2"):
        refuse(*[[torch.ones(2), sign * torch.ones(3)] for sign in (1, 1, -1)])


@pytest.mark.parametrize("value", [NAN, INF, [INF, -INF]], ids=str)
def test_parameters_that_are_not_finite_on_all_ranks_pass_and_on_one_are_named(value):
    lost = torch.ones(2) * torch.tensor(value)
    refuse([lost], [lost])
    with pytest.raises(NanoWorkerError, match=r"Net\.0 "):
        refuse([torch.ones(2)], [lost])


def test_sparse_and_empty_parameters_are_compared():
    refuse([torch.eye(3).to_sparse(), torch.empty(0, 2)], [torch.eye(3).to_sparse(), torch.empty(0, 2)])
