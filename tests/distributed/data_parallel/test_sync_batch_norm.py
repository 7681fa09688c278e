"""Batch norm with a shared batch, and synchronized batch norm, match batch norm of one process on all rows."""

import copy
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed, nn

from distributed.data_parallel.averaged import assert_close, plain
from nano_loop.distributed.comm.split_batches import Share, SplitBatches
from nano_loop.distributed.data_parallel.sync_batch_norm import norms_over_all_ranks
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.errors import NanoError
from nano_loop.kernels.norm import norms
from nano_loop.patching.ownership import Rules

SHAPES = {
    "images": ((6, 3, 5, 4), nn.BatchNorm2d, {}),
    "sequences, cumulative": ((6, 3, 7), nn.BatchNorm1d, {"momentum": None}),
    "vectors without parameters": ((6, 3), nn.BatchNorm1d, {"affine": False}),
    "without statistics": ((6, 3, 2, 2, 2), nn.BatchNorm3d, {"track_running_stats": False}),
}
SIZES = [("synchronized", (3, 3)), ("synchronized", (6, 0)), ("split", (3, 3)), ("split", (5, 1))]
WAYS = pytest.mark.parametrize(("way", "sizes"), SIZES, ids=str)


@contextmanager
def sharing(ranks, way, sizes):
    """Compute norms over the rows of all ranks, and yield the function that converts a norm for this."""
    if way == "split":
        start = sum(sizes[: ranks.rank])
        ranks.context.split = SplitBatches(Share(start, start + sizes[ranks.rank], sum(sizes), len(sizes)))
    with norms_over_all_ranks(ranks):
        yield nn.SyncBatchNorm.convert_sync_batchnorm if way == "synchronized" else nn.Identity()


def parts(ranks, batches, sizes):
    rows = [batch.split(sizes)[ranks.rank] for batch in batches]
    return [row.clone().requires_grad_() for row in rows]


def run(norm, batches, targets):
    """Run two batches in training and one in evaluation, and return the outputs and gradients."""
    results = []
    for batch, target in zip(batches, targets, strict=True):
        norm.zero_grad()
        output = norm(batch)
        (output.sin() * target).sum().backward()
        results += [output.detach(), batch.grad, *(each.grad.clone() for each in norm.parameters())]
    if [*norm.buffers()]:
        norm.eval()
    return results, [norm(batches[0]).detach(), *norm.buffers()]


@WAYS
@pytest.mark.parametrize("name", SHAPES)
def test_output_gradients_and_statistics_are_those_of_one_process(team, name, way, sizes):
    shape, kind, settings = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    batches = [50 + torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    targets = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    norm = kind(3, dtype=torch.float64, **settings)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, generator=generator)

    def on_rank(ranks):
        with sharing(ranks, way, sizes) as made:
            own, rows = made(copy.deepcopy(norm)), [each.split(sizes)[ranks.rank] for each in targets]
            results, after = run(own, parts(ranks, batches, sizes), rows)
        for gradient in [each for each in results if each.shape == (3,)]:
            distributed.all_reduce(gradient)
        return results, after

    (first, after), (second, other) = team(2)(on_rank)
    whole = [each.clone().requires_grad_() for each in batches]
    expected, expected_after = run(norm, whole, targets)
    for one, two, right in zip(first, second, expected, strict=True):
        got = one if right.shape == (3,) else torch.cat([one, two])
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    for one, two, right in zip(after[1:], other[1:], expected_after[1:], strict=True):
        torch.testing.assert_close(one, right, rtol=1e-12, atol=1e-12)
        assert one.equal(two)
    torch.testing.assert_close(torch.cat([after[0], other[0]]), expected_after[0], rtol=1e-12, atol=1e-12)


@WAYS
def test_second_derivatives_are_those_of_one_process(team, way, sizes):
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(6, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    nn.init.normal_(norm.weight, generator=generator)

    def second(norm, x, target):
        """Return the derivatives of the squared sum of the input's gradient, after two calls."""
        (first,) = torch.autograd.grad((norm(norm(x).sin()) * target).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, norm.weight])

    def on_rank(ranks):
        with sharing(ranks, way, sizes) as made:
            of_x, of_weight = second(made(copy.deepcopy(norm)), *parts(ranks, [x, target], sizes))
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
        with norms_over_all_ranks(ranks):
            output = norm(x.bfloat16())
        return output, nn.BatchNorm1d(3)(x.bfloat16())

    for output, expected in team(2)(on_rank):
        assert output.dtype is torch.bfloat16
        torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_reduced_precision_is_as_near_to_fp64_as_one_process(team, dtype, form, has_kernel):
    """With the kernel, one rank computes in C and the other in torch."""
    shape, sizes = (10, 32, 32, 32), (9, 1)
    generator = torch.Generator().manual_seed(0)
    x, target = (3 + torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x, target = (each.to(dtype).contiguous(memory_format=form) for each in (x, target))
    rules = Rules(kernels=frozenset({norms.KERNEL.name}) if has_kernel else frozenset())

    def on_rank(ranks):
        before, own_rules = norms.KERNEL.calls, None if ranks.rank else rules
        with sharing(ranks, "split", sizes), mock.patch.object(norms, "rules_now", return_value=own_rules):
            found = in_two_directions(nn.BatchNorm2d(32), *parts(ranks, [x, target], sizes))
            calls = norms.KERNEL.calls - before
        return found, calls, in_two_directions(nn.BatchNorm2d(32), x.clone().requires_grad_(), target)  # in one thread

    (first, calls, torchs), (second, others, _) = team(2)(on_rank)
    assert (calls, others) == (2 * has_kernel, 0)
    exact = in_two_directions(nn.BatchNorm2d(32, dtype=torch.float64), x.double().requires_grad_(), target.double())
    for one, two, theirs, right in zip(first, second, torchs, exact, strict=True):
        ours = torch.cat([one, two]) if one.dim() > 1 else one
        assert (ours - right).norm() <= 2 * (theirs - right).norm() + 1e-7 * right.norm()


def in_two_directions(norm, x, target):
    output = norm(x)
    output.backward(target.detach())
    return [each.detach().double() for each in (output, x.grad, norm.running_mean, norm.running_var)]


def statistics_after(norm, x):
    norm(x)
    return plain(norm)


def test_rows_that_all_ranks_have_count_once(team):
    """An undivided loader has such rows: `update_bn` iterates over it without gradients."""
    x = torch.randn(5, 3, dtype=torch.float64)

    def on_rank(ranks):
        with sharing(ranks, "split", (3, 2)), torch.no_grad():
            return statistics_after(nn.BatchNorm1d(3, dtype=torch.float64), x)

    expected = statistics_after(nn.BatchNorm1d(3, dtype=torch.float64), x)
    for found in team(2)(on_rank):
        assert_close(found, expected, 1e-14)


def test_what_is_whole_and_what_another_thread_computes_is_not_exchanged(team):
    x = torch.randn(5, 3)

    def on_rank(ranks):
        ranks.channel, found = None, []  # an exchange would need a channel

        def compute():
            found.append(statistics_after(nn.BatchNorm1d(3), x))

        with sharing(ranks, "split", (3, 2)):
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
            for share in (None, Share.of(1, ranks.rank, 2)):
                ranks.context.split.share = share
                compute()
            with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
                nn.BatchNorm1d(3)(x[:1])
        return found

    for found in team(2)(on_rank):
        assert len(found) == 3
        for each in found:
            assert_close(each, statistics_after(nn.BatchNorm1d(3), x), 1e-6)  # ranks use fewer threads


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_computes_over_the_rows_of_all_ranks(team, backend):
    x = torch.randn(5, 3, dtype=torch.float64)

    def after(x):
        norm = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(3), nn.Tanh()).double()
        torch.compile(norm, backend=backend)(x).square().sum().backward()
        return plain(norm)

    def on_rank(ranks):
        with sharing(ranks, "split", (3, 2)):
            return after(*parts(ranks, [x], (3, 2)))

    expected = after(x)
    for found in team(2)(on_rank):
        assert_close(found, expected, 1e-12)


def sampling_alone(ranks, model, x):
    if ranks.rank == 0:
        with torch.no_grad():
            model(x)
    return model(x).sum()


def calling_twice(ranks, model, x):
    return sum(model(x).sum() for _ in range(1 + ranks.rank))


def evaluating_alone(ranks, model, x):
    if ranks.rank == 0:
        model.eval()(x)
        model.train()
    return model(x).sum()


@pytest.mark.parametrize(
    ("loss_of", "words"),
    [
        (sampling_alone, "under no_grad, statistics of 7 numbers) that rank 1 is not in"),
        (calling_twice, "gradients of 6 numbers) that rank 1 is not in"),
        (evaluating_alone, None),
    ],
)
def test_ranks_that_call_a_norm_differently_are_told(team, tmp_path, loss_of, words):
    def on_rank(ranks):
        ranks.channel = SharedChannel(ranks, Path(tmp_path), "norms")
        model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
        try:
            with sharing(ranks, "split", (4, 4)):
                loss_of(ranks, model, x).backward()
        except NanoError as error:
            return str(error)
        finally:
            ranks.channel.close()
        return None

    first, second = team(2)(on_rank)
    if words is None:
        assert first is second is None
    else:
        assert first.startswith("rank 0 is in a collective (a batch norm in train mode")
        assert words in first
        assert "model.eval()" in second
