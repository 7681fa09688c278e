"""Helpers of both transports' tests: lists of tensors that each rank can reproduce, and their exact means."""

from functools import partial

import torch

from nano_loop.distributed.data_parallel.buckets import GroupTransport
from nano_loop.distributed.shared_memory.shared_file import map_together
from nano_loop.distributed.shared_memory.shared_ring import SharedMemoryTransport

KINDS = ("shared memory", "process group")
SMALL = 512  # a small chunk in bytes, so that small lists need many batches


def opened(kind, ranks, folder, size=SMALL):
    """Make a transport; `size` is the size of its chunk or bucket."""
    if kind == "process group":
        return GroupTransport(ranks, capacity=size)
    return SharedMemoryTransport(ranks, partial(map_together, ranks, folder / "averaging-gradients"), chunk=size)


def values(seed, rank, shape, dtype):
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def assert_means(results, lists):
    """Assert that `results`, by rank, equal the means of `lists` up to rounding, and agree bitwise."""
    means = [torch.stack([each.double() for each in group]).mean(0) for group in zip(*lists, strict=True)]
    for result in results[1:]:
        assert all(map(same_bits, result, results[0]))
    for number, (got, expected) in enumerate(zip(results[0], means, strict=True)):
        if expected.numel():
            largest = max(float(each[number].to(expected.dtype).abs().max()) for each in lists)
            error = float((got.to(expected.dtype) - expected).abs().max())
            assert error <= torch.finfo(got.dtype).eps * len(lists) * largest, (number, got.dtype, error)


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
