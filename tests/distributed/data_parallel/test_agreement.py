"""Ranks that compute the same results are detected; ranks with different batches get no warning."""

import itertools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from distributed.data_parallel.averaged import trained
from nano_loop.errors import NanoWarning
from nano_loop.patching import user_code


class Task:
    """A model after setup, and data that all ranks share."""

    def __init__(self, setup, model=None):
        setup.ranks.context.common_seed = torch.initial_seed()  # ranks draw different numbers from the first call on
        self.model = model or nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        setup.setup(self.model, self.optimizer)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(12, 4, generator=generator)
        self.y = torch.randint(2, (12,), generator=generator)
        self.setup, self.rank = setup, setup.rank

    def step(self, x, y, loss=cross_entropy):
        self.optimizer.zero_grad()
        loss(self.model(x), y).backward()
        self.optimizer.step()


def same_batches(setup):
    task = Task(setup)
    return lambda: task.step(task.x, task.y)


def same_batches_with_noise(setup):
    task = Task(setup)
    return lambda: task.step(task.x + 0.1 * torch.randn(12, 4), task.y)


def actions_of_an_agent(setup):
    task = Task(setup)

    def step():
        state, loss = task.x[:1], 0.0
        for _ in range(20):
            policy = torch.distributions.Categorical(logits=task.model(state))
            action = policy.sample()
            loss = loss - policy.log_prob(action).sum() * state.sum()
            state = (state + action) / 2  # small, so that the policy stays uncertain and the ranks act differently
        task.optimizer.zero_grad()
        loss.backward()
        task.optimizer.step()

    return step


def same_sparse_gradients(setup):
    task = Task(setup, nn.Embedding(12, 2, sparse=True))
    return lambda: task.step(torch.arange(6), task.y[:6])


def of_rank(setup):
    task = Task(setup)
    return lambda: task.step(task.x[task.rank :: 2], task.y[task.rank :: 2])


def without_gradients(setup):
    task = Task(setup)
    return lambda: task.step(task.x, task.y, loss=lambda out, y: 0 * out.sum())


def of_rank_after_10_steps(setup):
    task, steps = Task(setup), itertools.count()

    def step():
        mine = slice(None) if next(steps) < 10 else slice(task.rank, None, 2)
        task.step(task.x[mine], task.y[mine])

    return step


def same_and_not_a_number(setup):
    task = Task(setup)
    return lambda: task.step(task.x * float("nan"), task.y)


#: Whether the ranks report identical work after the first step.
DIVIDED = {
    of_rank: False,
    actions_of_an_agent: False,
    without_gradients: False,
    same_batches_with_noise: True,  # the ranks have drawn the same numbers so far
    of_rank_after_10_steps: True,
}


def judged(setup, make, steps):
    """Return whether the ranks report identical work, after the first step and after the last, and their warnings."""
    step = make(setup)
    undivided = []
    user_code._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step()
            undivided.append(setup.ranks.context.sharding.undivided)
    return (
        undivided[0],
        undivided[-1],
        [(str(each.message), each.filename) for each in caught if issubclass(each.category, NanoWarning)],
    )


@pytest.mark.parametrize("make", [same_batches, same_sparse_gradients, same_and_not_a_number])
def test_ranks_that_compute_the_same_find_it_out_and_one_warns_once_after_some_steps(team, make):
    (*first, warned), (*second, silent) = team(2)(trained, judged, make, 25)
    assert first == second == [True, True]
    ((message, filename),) = warned
    assert message.startswith("each of the 2 ranks computes the same batches: several processes gain nothing")
    assert Path(filename) == Path(__file__)
    assert silent == []
    assert team(2)(trained, judged, make, 10) == [[True, True, []]] * 2


@pytest.mark.parametrize("make", DIVIDED)
def test_ranks_with_batches_of_their_own_are_not_warned(team, make):
    assert team(2)(trained, judged, make, 25) == [[DIVIDED[make], False, []]] * 2
