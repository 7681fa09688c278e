"""The step chooses how gradients are exchanged; `tests/distributed/data_parallel` covers the results."""

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


def test_one_process_has_nothing_to_average():
    assert not make_step(GradientAveraging, ALONE)[0].enabled


@pytest.mark.parametrize(
    ("hosts", "folder", "detail"),
    [
        (1, None, "at the end of each backward, through shared memory"),
        (2, "/nowhere", "during each backward, by gloo"),
    ],
    ids=["shared memory", "two hosts"],
)
def test_ranks_take_the_steps_of_one_process_and_are_on_their_own_after_the_run(team, tmp_path, hosts, folder, detail):
    def loop(ranks):
        given, before = parts(), ranks.folder
        step, interceptors = make_step(GradientAveraging, ranks)
        ranks.local_size = ranks.size // hosts
        ranks.folder = Path(folder or tmp_path)
        try:
            with step.without_averaging(given.models):
                pass  # before any setup
            assert step.enabled
            assert step.skip_reason(given) is None
            assert step.apply(given) == detail
            assert step.apply(TrainingObjects(given.models)) == detail
            trained = [each.clone() for each in train(given, ranks)]
            given.optimizers[0].zero_grad()
            with step.without_averaging(given.models):
                given.models[0](torch.ones(1, 6) * ranks.rank).sum().backward()
            own = given.models[0][0].weight.grad.clone()
        finally:
            ranks.folder = before
        interceptors.close()
        step.undo()
        ranks.barrier()
        assert not [*tmp_path.iterdir()]
        if ranks.rank == 0:
            train(given, ranks)
        return trained, own

    (first, own), (second, others) = team(2)(loop)
    assert not own.equal(others)
    for one, other, alone in zip(first, second, train(parts(), ALONE), strict=True):
        assert one.equal(other)
        torch.testing.assert_close(one, alone, rtol=0, atol=1e-6 * float(alone.abs().max()))
