"""What the tests of both transports share: lists of tensors that each rank makes alike, and their exact means."""

import random
import time
from functools import partial

import torch

from nano_loop.distributed.data_parallel.buckets import GroupTransport
from nano_loop.distributed.shared_memory.shared_file import map_together
from nano_loop.distributed.shared_memory.shared_ring import SharedMemoryTransport

KINDS = ("shared memory", "process group")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SMALL = 512  # bytes that travel at once, so that small lists make many batches


def opened(kind, ranks, folder, size=SMALL, **options):
    """A transport; `size` is of its chunk or bucket."""
    if kind == "process group":
        return GroupTransport(ranks, capacity=size, **options)
    mapped = partial(map_together, ranks, folder / "averaging-gradients")
    return SharedMemoryTransport(ranks, mapped, chunk=size, **options)


def values(seed, rank, shape, dtype):
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def random_list(seed, rank, dtypes=DTYPES):
    """A list whose shapes and dtypes follow from the seed, its values from the rank as well."""
    common = random.Random(seed)
    tensors = []
    for number in range(common.randrange(12)):
        shape = [common.choice((0, 1, 2, 3, 4, 7)) for _ in range(common.randrange(5))]
        dtype = common.choice(dtypes)
        tensors.append(values(seed * 100 + number, rank, shape, dtype))
    return tensors


def means(lists):
    """The means of all ranks' lists, in double precision."""
    return [torch.stack([each.double() for each in group]).mean(0) for group in zip(*lists, strict=True)]


def assert_means(results, lists, eps=None):
    """`results`, by rank, are the means of `lists` but for rounding, and the same to the bit."""
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
    """What one rank gets for the lists of `seeds`, after random naps of up to `delay` seconds."""
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
    """What one rank's list, which ``make(rank)`` makes, becomes in one averaging."""
    transport, tensors = opened(kind, ranks, folder, **(options or {})), make(ranks.rank)
    transport.average(tensors)
    transport.close()
    return tensors
