"""The step chooses how gradients travel, and leaves nothing behind."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from distributed.data_parallel.averaged import make_step
from torch import nn

from nano_loop.distributed.comm.ranks import ALONE
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.gradient_averaging import GradientAveraging


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return TrainingObjects([model], [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])


def train(given, ranks, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(12, 6).chunk(ranks.size)[ranks.rank]
        given.optimizers[0].zero_grad()
        given.models[0](x).square().mean().backward()
        given.optimizers[0].step()
    return [each.detach() for each in given.models[0].parameters()]


@contextmanager
def averaging(ranks, **options):
    """Give the step, which has ended with its interceptors when the context is left."""
    step, interceptors = make_step(GradientAveraging, ranks, **options)
    yield step
    interceptors.close()
    step.undo()


def test_one_process_has_nothing_to_average():
    assert not make_step(GradientAveraging, ALONE)[0].enabled


WAYS = {
    "shared memory": ({}, "at the end of each backward, through shared memory", 1e-6),
    "gloo": ({"process_group_backend": "gloo"}, "at the end of each backward, through shared memory", 1e-6),
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_take_the_steps_of_one_process(team, way):
    options, detail, tolerance = WAYS[way]

    def loop(ranks):
        given = parts()
        with averaging(ranks, **options) as step:
            assert step.enabled
            assert step.skip_reason(given) is None
            assert step.apply(given) == detail
            assert step.apply(TrainingObjects(given.models)) == detail
            return train(given, ranks)

    expected = train(parts(), ALONE)
    first, second = team(2)(loop)
    for one, other, alone in zip(first, second, expected, strict=True):
        assert one.equal(other)
        torch.testing.assert_close(one, alone, rtol=0, atol=tolerance * float(alone.abs().max()))


@pytest.mark.parametrize("hosts", [1, 2])
def test_several_hosts_and_hosts_without_shared_memory_average_by_the_process_group(team, hosts):
    def loop(ranks):
        given = parts()
        with averaging(ranks) as step:
            ranks.local_size = ranks.size // hosts
            ranks.folder = Path("/nowhere")
            return step.apply(given), train(given, ranks)

    (detail, first), (_, second) = team(2)(loop)
    assert detail == ("at the end of each backward, by gloo" if hosts == 1 else "during each backward, by gloo")
    for one, other, alone in zip(first, second, train(parts(), ALONE), strict=True):
        assert one.equal(other)
        torch.testing.assert_close(one, alone, rtol=0, atol=1e-6 * float(alone.abs().max()))


def test_after_the_run_ranks_are_on_their_own(team, tmp_path):
    def loop(ranks):
        given, plain, folder = parts(), torch.autograd.backward, ranks.folder
        with averaging(ranks) as step:
            ranks.folder = tmp_path
            try:
                step.apply(given)
            finally:
                ranks.folder = folder
            train(given, ranks, steps=1)
        step.undo()
        ranks.barrier()
        assert not list(tmp_path.iterdir())
        assert torch.autograd.backward is plain
        assert all(each._post_accumulate_grad_hooks is None for each in given.models[0].parameters())
        if ranks.rank == 0:
            train(given, ranks)
        return True

    assert team(2)(loop) == [True, True]


def test_averaging_can_be_paused(team):
    def loop(ranks):
        given = parts()
        with averaging(ranks) as step:
            with step.without_averaging(given.models):
                pass  # before anything was set up
            step.apply(given)
            with step.without_averaging(given.models):
                given.models[0](torch.ones(1, 6) * ranks.rank).sum().backward()
            return given.models[0][0].weight.grad.clone()

    first, second = team(2)(loop)
    assert not first.equal(second)
