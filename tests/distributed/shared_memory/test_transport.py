"""Both transports return the means over the ranks, bitwise equal on all ranks."""

import pytest
import torch

from distributed.shared_memory.transports import (
    KINDS,
    SMALL,
    assert_means,
    averaged,
    once,
    opened,
    random_list,
    same_bits,
    values,
)

SIZES = (2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4)))
kinds = pytest.mark.parametrize("kind", KINDS)
sizes = pytest.mark.parametrize("size", SIZES)


@kinds
@sizes
def test_random_lists_become_their_means(team, tmp_path, kind, size):
    seeds = range(30)
    by_rank = team(size)(averaged, kind, tmp_path, seeds)
    for number, seed in enumerate(seeds):
        assert_means([results[number] for results in by_rank], [random_list(seed, rank) for rank in range(size)])


@kinds
@sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_are_summed_in_float32(team, tmp_path, kind, size, dtype):
    def make(rank):
        return [values(7, rank, (1000,), dtype)]

    total = sum(values(7, rank, (1000,), dtype).float() for rank in range(size))
    in_16_bits = sum(values(7, rank, (1000,), dtype) for rank in range(size)) / size
    for (got,) in team(size)(once, kind, tmp_path, make):
        assert same_bits(got, (total / size).to(dtype))
        assert size == 2 or not same_bits(got, in_16_bits)


@kinds
@sizes
def test_means_are_sums_divided(team, tmp_path, kind, size):
    def make(rank):
        return [values(3, rank, (999,), torch.float32), values(3, 0, (999,), torch.float32)]

    first, second = (values(3, rank, (999,), torch.float32) for rank in range(2))
    for own, equal in team(size)(once, kind, tmp_path, make):
        assert size != 2 or same_bits(own, (first + second) / 2)
        assert same_bits(equal, sum([first] * size) / size)
        assert size == 3 or same_bits(equal, first)


@kinds
@sizes
def test_lengths_around_whole_chunks(team, tmp_path, kind, size):
    room = SMALL // 4
    lengths = [max(0, n * room + more) for n in (0, 1, 2, 3, 4, 6) for more in (-1, 0, 1)]

    def run(ranks):
        transport = opened(kind, ranks, tmp_path)
        alone = [values(n, ranks.rank, (n,), torch.float32) for n in lengths]
        for tensor in alone:
            transport.average([tensor])
        together = [values(n, ranks.rank, (n,), torch.float32) for n in lengths]
        transport.average(together)
        transport.close()
        return alone + together

    lists = [[values(n, rank, (n,), torch.float32) for n in lengths * 2] for rank in range(size)]
    assert_means(team(size)(run), lists)


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


@kinds
def test_a_large_list_in_chunks_of_the_usual_size(team, tmp_path, kind):
    shapes = [(700_001,), (10,), (600, 512), (300, 5), (1_048_576,), (1,)]

    def make(rank):
        return [values(n, rank, shape, torch.float32) for n, shape in enumerate(shapes)]

    def run(ranks):
        transport = opened(kind, ranks, tmp_path, size=1 << 20)
        first, second = make(ranks.rank), make(ranks.rank)
        transport.average(first)
        transport.average(second)
        transport.close()
        return all(map(same_bits, first, second)), first

    results = team(2)(run)
    assert [alike for alike, _ in results] == [True, True]
    assert_means([first for _, first in results], [make(0), make(1)])
