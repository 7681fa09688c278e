"""Both transports return the means over the ranks, bitwise equal on all ranks."""

import random

import pytest
import torch

from distributed.shared_memory.transports import KINDS, SMALL, assert_means, opened, same_bits, values

kinds = pytest.mark.parametrize("kind", KINDS)
sizes = pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])


def averaged(ranks, kind, folder, make, size=SMALL):
    """Return one rank's averages of the lists that ``make(rank)`` makes, one after the other."""
    transport, lists = opened(kind, ranks, folder, size), make(ranks.rank)
    for tensors in lists:
        transport.average(tensors)
    transport.close()
    return lists


def random_list(seed, rank):
    """Return a list whose shapes and dtypes depend on the seed, and whose values depend on the rank, too."""
    common = random.Random(seed)
    tensors = []
    for number in range(common.randrange(12)):
        shape = [common.choice((0, 1, 2, 3, 4, 7)) for _ in range(common.randrange(5))]
        dtype = common.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
        tensors.append(values(seed * 100 + number, rank, shape, dtype))
    return tensors


def of_random_shapes(rank):
    return [random_list(seed, rank) for seed in range(30)]


def around_whole_chunks(rank):
    lengths = [max(0, n * SMALL // 4 + more) for n in (0, 1, 2, 3, 4, 6) for more in (-1, 0, 1)]
    tensors = [[values(n, rank, (n,), torch.float32) for n in lengths] for _ in range(2)]
    return [*([each] for each in tensors[0]), tensors[1]]


def of_many_chunks_of_the_usual_size(rank):
    shapes = [(700_001,), (10,), (600, 512), (300, 5), (1_048_576,), (1,)]
    return [[values(n, rank, shape, torch.float32) for n, shape in enumerate(shapes)] for _ in range(2)]


@kinds
@pytest.mark.parametrize(
    ("make", "chunk", "size"),
    [
        *(
            pytest.param(make, SMALL, size, marks=[pytest.mark.slow] * (size > 2))
            for make in (of_random_shapes, around_whole_chunks)
            for size in (2, 3, 4)
        ),
        (of_many_chunks_of_the_usual_size, 1 << 20, 2),
    ],
)
def test_lists_become_their_means(team, tmp_path, kind, make, chunk, size):
    by_rank = team(size)(averaged, kind, tmp_path, make, chunk)
    for results, lists in zip(zip(*by_rank, strict=True), zip(*map(make, range(size)), strict=True), strict=True):
        assert_means(results, lists)
    if make is of_many_chunks_of_the_usual_size:
        assert all(map(same_bits, *by_rank[0]))  # the same list twice


@kinds
@sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_are_summed_in_float32(team, tmp_path, kind, size, dtype):
    def make(rank):
        return [[values(7, rank, (1000,), dtype)]]

    total = sum(values(7, rank, (1000,), dtype).float() for rank in range(size))
    in_16_bits = sum(values(7, rank, (1000,), dtype) for rank in range(size)) / size
    for ((got,),) in team(size)(averaged, kind, tmp_path, make):
        assert same_bits(got, (total / size).to(dtype))
        assert size == 2 or not same_bits(got, in_16_bits)


@kinds
@sizes
def test_means_are_sums_divided(team, tmp_path, kind, size):
    def make(rank):
        return [[values(3, rank, (999,), torch.float32), values(3, 0, (999,), torch.float32)]]

    first, second = (values(3, rank, (999,), torch.float32) for rank in range(2))
    for ((own, equal),) in team(size)(averaged, kind, tmp_path, make):
        assert size != 2 or same_bits(own, (first + second) / 2)
        assert same_bits(equal, sum([first] * size) / size)
        assert size == 3 or same_bits(equal, first)


@kinds
def test_empty_lists_and_tensors_with_graphs_are_averaged(team, tmp_path, kind):
    def run(ranks):
        transport = opened(kind, ranks, tmp_path)
        transport.average([])
        transport.average([torch.empty(0), torch.empty(3, 0, 2)])
        tensors = [torch.empty(0), torch.tensor(float(ranks.rank)), torch.empty(0, dtype=torch.float64)]
        transport.average(tensors)
        weight = torch.full((300,), ranks.rank + 1.0, requires_grad=True)
        (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        transport.average([gradient, weight])
        after = torch.full((3,), float(ranks.rank))
        transport.average([after])
        transport.close()
        values = [each.detach().unique().tolist() for each in (gradient, weight)]
        return tensors[1].item(), gradient.requires_grad, values, after.tolist()

    assert team(2)(run) == [(0.5, True, [[7.5], [1.5]], [0.5] * 3)] * 2
