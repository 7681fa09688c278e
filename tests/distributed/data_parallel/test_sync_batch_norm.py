"""Synchronized batch norm on ranks is batch norm of one process on the batches of all."""

import copy

import pytest
import torch
from torch import distributed, nn

from nano_loop.distributed.data_parallel.sync_batch_norm import synchronized_on_cpu

SHAPES = {
    "images": ((6, 3, 5, 4), nn.BatchNorm2d, {}),
    "sequences, cumulative": ((6, 3, 7), nn.BatchNorm1d, {"momentum": None}),
    "vectors without parameters": ((6, 3), nn.BatchNorm1d, {"affine": False}),
    "without statistics": ((6, 3, 2, 2, 2), nn.BatchNorm3d, {"track_running_stats": False}),
}


def parts(ranks, batches, sizes):
    rows = [batch.split(sizes)[ranks.rank] for batch in batches]
    return [row.clone().requires_grad_() for row in rows]


def run(norm, batches, targets):
    """Two batches in training, one in evaluation: outputs and gradients."""
    results = []
    for batch, target in zip(batches, targets, strict=True):
        norm.zero_grad()
        output = norm(batch)
        (output.sin() * target).sum().backward()
        results += [output.detach(), batch.grad, *(each.grad.clone() for each in norm.parameters())]
    norm.eval()
    return results, [norm(batches[0]).detach(), *norm.buffers()]


@pytest.mark.parametrize("sizes", [(3, 3), (5, 1), (6, 0)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_output_gradients_and_statistics_are_those_of_one_process(team, name, sizes):
    shape, kind, settings = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    batches = [50 + torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    targets = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    norm = kind(3, dtype=torch.float64, **settings)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, generator=generator)

    def on_rank(ranks):
        own = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
        with synchronized_on_cpu():
            results, after = run(own, parts(ranks, batches, sizes), [each.split(sizes)[ranks.rank] for each in targets])
        for gradient in [each for each in results if each.shape == (3,)]:
            distributed.all_reduce(gradient)
        return results, after

    (first, after), (second, other) = team(2)(on_rank)
    whole = [each.clone().requires_grad_() for each in batches]
    expected, expected_after = run(norm, whole, targets)
    for one, two, right in zip(first, second, expected, strict=True):
        got = one if right.shape == (3,) else torch.cat([one, two])
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    if settings.get("track_running_stats", True):
        for one, two, right in zip(after[1:], other[1:], expected_after[1:], strict=True):
            torch.testing.assert_close(one, right, rtol=1e-12, atol=1e-12)
            assert one.equal(two)
        torch.testing.assert_close(torch.cat([after[0], other[0]]), expected_after[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(3, 3), (6, 0)], ids=str)
def test_second_derivatives_are_those_of_one_process(team, sizes):
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(6, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    nn.init.normal_(norm.weight, generator=generator)

    def second(norm, x, target):
        """Return the derivatives of the sum of the squares of the input's gradient, after two calls."""
        (first,) = torch.autograd.grad((norm(norm(x).sin()) * target).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, norm.weight])

    def on_rank(ranks):
        own = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
        with synchronized_on_cpu():
            of_x, of_weight = second(own, *parts(ranks, [x, target], sizes))
        distributed.all_reduce(of_weight)
        return of_x, of_weight

    (first, of_weight), (other, _) = team(2)(on_rank)
    expected = second(norm, x.clone().requires_grad_(), target)
    torch.testing.assert_close((torch.cat([first, other]), of_weight), expected, rtol=1e-9, atol=1e-12)


def test_bf16_stays_and_a_group_of_one_rank_is_by_itself(team):
    def on_rank(ranks):
        group = [distributed.new_group([rank]) for rank in range(2)][ranks.rank]
        norm = nn.SyncBatchNorm(3, process_group=group)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(ranks.rank))
        with synchronized_on_cpu():
            output = norm(x.bfloat16())
        return output, nn.BatchNorm1d(3)(x.bfloat16())

    for output, expected in team(2)(on_rank):
        assert output.dtype is torch.bfloat16
        torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
