"""Helpers of both transports' tests: lists of tensors that each rank can reproduce, and their exact means."""

import random
import time
from functools import partial

import torch

from nano_loop.distributed.data_parallel.buckets import GroupTransport
from nano_loop.distributed.shared_memory.shared_file import map_together
from nano_loop.distributed.shared_memory.shared_ring import SharedMemoryTransport

KINDS = ("shared memory", "process group")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SMALL = 512  # a small chunk in bytes, so that small lists need many batches


def opened(kind, ranks, folder, size=SMALL, **options):
    """Make a transport; `size` is the size of its chunk or bucket."""
    if kind == "process group":
        return GroupTransport(ranks, capacity=size, **options)
    mapped = partial(map_together, ranks, folder / "averaging-gradients")
    return SharedMemoryTransport(ranks, mapped, chunk=size, **options)


def values(seed, rank, shape, dtype):
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def random_list(seed, rank, dtypes=DTYPES):
    """Return a list whose shapes and dtypes depend on the seed, and whose values depend on the rank, too."""
    common = random.Random(seed)
    tensors = []
    for number in range(common.randrange(12)):
        shape = [common.choice((0, 1, 2, 3, 4, 7)) for _ in range(common.randrange(5))]
        dtype = common.choice(dtypes)
        tensors.append(values(seed * 100 + number, rank, shape, dtype))
    return tensors


def means(lists):
    """Return the means of all ranks' lists, in double precision."""
    return [torch.stack([each.double() for each in group]).mean(0) for group in zip(*lists, strict=True)]


def assert_means(results, lists, eps=None):
    """Assert that `results`, by rank, equal the means of `lists` up to rounding, and agree bitwise."""
    for result in results[1:]:
        assert all(map(same_bits, result, results[0]))
    for number, (got, expected) in enumerate(zip(results[0], means(lists), strict=True)):
        if expected.numel():
            largest = max(float(each[number].to(expected.dtype).abs().max()) for each in lists)
            error = float((got.to(expected.dtype) - expected).abs().max())
            assert error <= (eps or torch.finfo(got.dtype).eps) * len(lists) * largest, (number, got.dtype, error)


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.equal(other)


def averaged(ranks, kind, folder, seeds, dtypes=DTYPES, delay=0.0, **options):
    """Return one rank's averages of the lists of `seeds`, with random delays of up to `delay` seconds."""
    transport, naps = opened(kind, ranks, folder, **options), random.Random(ranks.rank)
    results = []
    for seed in seeds:
        tensors = random_list(seed, ranks.rank, dtypes)
        if naps.random() < 0.2:
            time.sleep(naps.random() * delay)
        transport.average(tensors)
        results.append(tensors)
    transport.close()
    return results


def once(ranks, kind, folder, make, options=None):
    """Return the average of one rank's list, which ``make(rank)`` makes."""
    transport, tensors = opened(kind, ranks, folder, **(options or {})), make(ranks.rank)
    transport.average(tensors)
    transport.close()
    return tensors
