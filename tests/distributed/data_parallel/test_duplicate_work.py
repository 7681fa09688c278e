"""Ranks that all compute the same find it out; ranks with different batches get no warning."""

import sys
import warnings
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from distributed.data_parallel.averaged import Setup, trained
from nano_loop.distributed.data_parallel import duplicate_work
from nano_loop.distributed.sharding.sharding import BatchSharding
from nano_loop.errors import NanoWarning
from nano_loop.patching import user_code

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a team's processes cannot import the tests


class Task:
    """A model that was set up, and data that every rank has."""

    def __init__(self, setup, model=None):
        setup.ranks.context.common_seed = torch.initial_seed()  # ranks draw other numbers from the first call on
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


def with_dropout(*modules):
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2), *modules)


def same_batches(setup):
    task = Task(setup)
    return lambda: task.step(task.x, task.y)


def same_batches_with_dropout(setup):
    task = Task(setup, with_dropout())
    return lambda: task.step(task.x, task.y)


def same_graph_with_dropout_and_a_mask(setup):
    task = Task(setup, with_dropout())

    def step():
        task.optimizer.zero_grad()
        cross_entropy(task.model(task.x)[:6], task.y[:6]).backward()
        task.optimizer.step()

    return step


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
            state = (state + action) / 2  # small, so that the policy stays undecided and the ranks act differently
        task.optimizer.zero_grad()
        loss.backward()
        task.optimizer.step()

    return step


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4 + 6, 6), nn.Linear(6, 2)

    def forward(self, x, state):
        state = nn.functional.dropout(self.inner(torch.cat([x, state], 1)).tanh(), 0.3)
        return self.outer(state), state


def carried_state_with_dropout(setup):
    task = Task(setup, Recurrent())
    state = torch.zeros(12, 6)

    def step():
        nonlocal state
        task.optimizer.zero_grad()
        out, state = task.model(task.x, state.detach())
        cross_entropy(out, task.y).backward()
        task.optimizer.step()

    return step


def own_outputs_as_inputs_with_dropout(setup):
    task = Task(setup, nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 4)))
    x = task.x

    def step():
        nonlocal x
        task.optimizer.zero_grad()
        rollout = task.model(x)  # continues where the last step ended
        cross_entropy(rollout, task.y).backward()
        task.optimizer.step()
        x = rollout.data

    return step


def same_sparse_gradients(setup):
    task = Task(setup, nn.Embedding(12, 2, sparse=True))
    return lambda: task.step(torch.arange(6), task.y[:6])


def of_rank(setup):
    task = Task(setup)
    return lambda: task.step(task.x[task.rank :: 2], task.y[task.rank :: 2])


def of_rank_with_dropout(setup):
    task = Task(setup, with_dropout())
    return lambda: task.step(task.x[task.rank :: 2], task.y[task.rank :: 2])


def targets_of_rank(setup):
    task = Task(setup)
    return lambda: task.step(task.x, task.y if task.rank else 1 - task.y)


def one_graph_with_dropout_and_nodes_of_rank(setup):
    task = Task(setup, with_dropout())

    def step():
        task.optimizer.zero_grad()
        cross_entropy(task.model(task.x)[task.rank :: 2], task.y[task.rank :: 2]).backward()
        task.optimizer.step()

    return step


def of_a_divided_loader(setup):
    task = Task(setup)

    def step():
        setup.ranks.context.sharding.delivered = True  # and happens to be the same
        task.step(task.x, task.y)

    return step


def without_gradients(setup):
    task = Task(setup)
    return lambda: task.step(task.x, task.y, loss=lambda out, y: 0 * out.sum())


SAME = (
    same_batches,
    same_batches_with_dropout,
    same_graph_with_dropout_and_a_mask,
    carried_state_with_dropout,
    own_outputs_as_inputs_with_dropout,
    same_sparse_gradients,
)
DIVIDED = (
    of_rank,
    of_rank_with_dropout,
    targets_of_rank,
    one_graph_with_dropout_and_nodes_of_rank,
    of_a_divided_loader,
    actions_of_an_agent,
    without_gradients,
)


def judged(setup, make, steps, forget=True):
    """Whether the ranks find that they compute the same after the first step and after all, and their warnings."""
    step = make(setup)
    undivided = []
    if forget:
        user_code._warned.clear()
        duplicate_work._counts.clear()
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


@pytest.mark.slow
@pytest.mark.parametrize("make", SAME)
def test_ranks_that_compute_the_same_find_it_out_and_one_warns_once_of_the_line(team, make):
    (*first, warned), (*second, silent) = team(2)(trained, judged, make, 25)
    assert first == second == [True, True]
    ((message, filename),) = warned
    assert message.startswith("each of the 2 ranks computes the same batches: several processes gain nothing")
    assert Path(filename) == Path(__file__)
    assert silent == []


@pytest.mark.parametrize("make", DIVIDED)
def test_ranks_with_batches_of_their_own_are_not_warned(team, make):
    assert team(2)(trained, judged, make, 25) == [[False, False, []]] * 2


def test_noise_of_each_rank_makes_its_work_different(team):
    for undivided_first, undivided, warned in team(2)(trained, judged, same_batches_with_noise, 25):
        assert undivided_first  # the ranks have drawn the same so far
        assert not undivided
        assert not warned


def test_few_steps_are_not_warned_of_until_many_calls_have_taken_them(team):
    def loop(setup):
        setup.close()
        results = []
        duplicate_work._counts.clear()
        user_code._warned.clear()
        for _ in range(14):
            run = Setup(setup.ranks)
            torch.manual_seed(0)  # models begin equal
            results.append(judged(run, same_batches, 1, forget=False)[1:])
            run.close()
            setup.ranks.context.sharding.warnings_given.clear()
        return results

    first, second = team(2)(trained, loop)
    assert all(undivided for undivided, _ in first)
    assert [len(warned) for _, warned in first] == [0] * 10 + [1] + [0] * 3
    assert not any(warned for _, warned in second)


def test_ranks_that_divide_after_some_steps_are_found_out(team):
    def loop(setup):
        task = Task(setup)
        setup.ranks.context.sharding.warnings_given.add("undivided")
        found = []
        for step in range(12):
            mine = slice(None) if step < 10 else slice(task.rank, None, 2)
            task.step(task.x[mine], task.y[mine])
            found.append(setup.ranks.context.sharding.undivided)
        return found

    assert team(2)(trained, loop) == [[True] * 10 + [False] * 2] * 2


def test_batch_of_a_divided_loader_ends_it_at_once(team):
    def loop(setup):
        task = Task(setup)
        task.step(task.x, task.y)
        before = setup.ranks.context.sharding.undivided
        setup.ranks.context.sharding.delivered = True
        task.step(task.x, task.y)
        return before, setup.ranks.context.sharding.undivided

    assert team(2)(trained, loop) == [[True, False]] * 2


@pytest.mark.parametrize(
    ("numbers", "same"),
    [(lambda step, rank: step, True), (lambda step, rank: 7, False), (lambda step, rank: 2 * step + rank, False)],
    ids=["next lines of a file", "constant", "divided"],
)
def test_loaders_that_deliver_the_same_batches_are_warned_of_at_the_second_step(team, numbers, same):
    def loop(setup):
        task = Task(setup)
        served = BatchSharding(setup.ranks, [task.model])
        steps = iter(range(30))

        def step():
            served.served([torch.tensor([numbers(next(steps), setup.rank)])], whole=False, by_mode=False)
            task.step(task.x + torch.rand(1), task.y)

        return judged(setup, lambda setup: step, 2 if same else 12)

    (_, *first), (_, *second) = team(2)(trained, loop)
    assert [first[0], second[0], second[1]] == [same, same, []]
    assert [message.startswith("the loaders of all 2 ranks deliver") for message, _ in first[1]] == [True] * same


def test_second_model_that_the_same_line_trains_for_long_is_warned_of(team):
    def loop(setup):
        setup.close()
        results = []
        for steps in (12, 12, 3):
            run = Setup(setup.ranks)
            torch.manual_seed(0)
            results.append(len(judged(run, carried_state_with_dropout, steps, forget=not results)[2]))
            run.close()
            setup.ranks.context.sharding.warnings_given.clear()
        return results

    assert team(2)(trained, loop) == [[1, 1, 0], [0, 0, 0]]


def test_loader_that_was_not_to_be_divided_is_not_warned_of(team):
    def loop(setup):
        setup.ranks.context.sharding.chosen = True
        return judged(setup, same_batches, 12)

    assert team(2)(trained, loop) == [[True, True, []]] * 2


def test_nan_gradients_are_compared_too(team):
    def loop(setup):
        task = Task(setup)
        return judged(setup, lambda setup: lambda: task.step(task.x * float("nan"), task.y), 2)[:2]

    assert team(2)(trained, loop) == [[True, True]] * 2
