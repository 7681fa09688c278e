"""A length by which a sum would be divided wrongly is warned of, by the line that took it."""

import linecache
import sys
import warnings
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.errors import NanoWarning
from nano_loop.patching import user_code
from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps import StepContext
from nano_loop.steps.sharding import Sharding

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a team's processes cannot import the tests


def sum_of(model, loader):
    total = 0.0
    for (x,) in loader:
        total += model(x).sum().item()
    return total


def test_of_the_quickstart(model, loader):
    size = len(loader.dataset)
    model.eval()
    with torch.no_grad():
        return sum_of(model, loader) / size


def metric_after_train_mode(model, loader):
    model.eval()
    total = sum_of(model, loader)
    model.train()
    return total / len(loader.dataset), total / len(loader)


def of_the_users_sampler(model, loader):
    own = DataLoader(loader.dataset, 4, sampler=DistributedSampler(loader.dataset))
    return sum_of(model, own) / len(own.dataset)


def batches_taken_too_early(model, loader):
    batches = len(loader)
    model.eval()
    with torch.no_grad():
        return sum_of(model, loader) / batches


def batches_taken_in_eval_mode_after_training(model, loader):
    sum_of(model, loader)
    model.eval()
    batches = len(loader)
    return sum_of(model, loader) / batches


def batches_of_the_training_in_eval_mode(model, loader):
    total = sum_of(model, loader)
    model.eval()
    assert len(loader) == 3
    return total / len(loader)


def batches_for_a_schedule(model, loader):
    steps = 2 * len(loader)
    sum_of(model, loader)
    with torch.no_grad():
        return sum_of(model, loader) / len(loader), steps


test_of_the_quickstart.__test__ = False


def warned(ranks, loop, set_up, times=2):
    """The warnings of NanoWarning's kind, as (message, the line that is named), for a loop that is called again."""
    model, loader = nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(20.0)[:, None]), 4)
    step = Sharding(StepContext(Options(), Machine("A CPU", "x86_64", (), (0,)), CallInterceptors(), ranks))
    parts = TrainingObjects(models=[model], loaders=[loader] if set_up else [])
    step.observe(parts)
    if set_up:
        step.apply(parts)
    user_code._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            loop(model.train(), loader)
    step.undo()
    ours = [each for each in caught if issubclass(each.category, NanoWarning)]
    return [(str(each.message), Path(each.filename).name, each.lineno) for each in ours]


WARNED = {
    batches_taken_in_eval_mode_after_training: ("len(loader) was 3, the batches of one of", "batches = len(loader)"),
    batches_taken_too_early: ("len(loader) was 3, the batches of one of 2 ranks", "batches = len(loader)"),
}


@pytest.mark.parametrize("set_up", [True, False])
@pytest.mark.parametrize("loop", WARNED)
def test_rank_0_warns_once_of_the_line_that_took_a_wrong_divisor(team, loop, set_up):
    message, line = WARNED[loop]
    (one,), silent = team(2)(warned, loop, set_up)
    assert one[0].startswith(message)
    assert one[1] == Path(__file__).name
    assert line in linecache.getline(__file__, one[2])
    assert silent == []


@pytest.mark.parametrize(
    "loop",
    [
        test_of_the_quickstart,
        metric_after_train_mode,
        of_the_users_sampler,
        batches_for_a_schedule,
        batches_of_the_training_in_eval_mode,
    ],
)
def test_right_divisors_and_other_uses_are_not_warned_of(team, loop):
    assert team(2)(warned, loop, True) == team(2)(warned, loop, False) == [[], []]
