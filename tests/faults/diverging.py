"""Faults: ranks that diverge: in their steps, models, learning rates or data."""

import os
from contextlib import nullcontext, suppress

import pytest
import torch
from distributed import small
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import nano_loop
from faults.fault import Fault
from faults.runs import OPTIONS, collective, on, on_each
from nano_loop import NanoWarning, TorchNano, nano


def _loop(change):
    """Return a function that trains after ``change(rank, model, optimizer)``."""

    def fit(model, optimizer, loader):
        change(small.rank(), model, optimizer)
        return small.fit(model, optimizer, loader)

    return lambda: nano(**OPTIONS)(fit)(*small.parts())


def _leaving(rank, step, **options):
    """Return a function that trains, with one rank that leaves the loop before a step."""

    def fit(*parts):
        def each_step(*place):
            if place == (rank, step):
                raise StopIteration

        with suppress(StopIteration):
            small.fit(*parts, each_step)

    return lambda: nano(**OPTIONS | options)(fit)(*small.parts())


def _logging(rank):
    """Return a function that trains on shared batches, and computes a loss of its part on one rank alone."""

    def fit(model, optimizer, loader):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x).expand(-1, 2), (y > 1.5).squeeze(1).long())
            if small.rank() == rank:
                nn.functional.cross_entropy(model(x).expand(-1, 2), (y > 1.5).squeeze(1).long()).item()
            loss.backward()
            optimizer.step()

    return lambda: nano(**OPTIONS, split_batches=True)(fit)(*small.parts())


class _AnotherOrder(Sampler):
    """Yields the same first batch on every rank, and then a different one on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 8

    def __iter__(self):
        batches = [[*range(start, start + 4)] for start in range(0, 32, 4)]
        return iter(batches if small.rank() != self.rank else [batches[0], *batches[:0:-1]])


def _of_another_order(rank):
    model, optimizer, loader = small.parts()
    return model, optimizer, DataLoader(loader.dataset, batch_sampler=_AnotherOrder(rank))


class _Leaving(TorchNano):
    def train(self, model, optimizer, loader):
        model, optimizer, loader = self.setup(model, optimizer, loader)
        for number, (x, y) in enumerate(loader):
            if (self.global_rank, number) == (1, 2):
                return
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


def _overwriting(options):
    """Return a function that trains for some epochs, with a rank that has lost its weights."""

    def fit(model, optimizer, loader):
        if small.rank() == 1:
            nn.init.zeros_(next(model.parameters()))
        return small.fit(model, optimizer, loader, epochs=10)

    return lambda: nano(**options)(fit)(*small.parts())


class _Changing(nn.Linear):
    """Changes itself in each call, according to its batch."""

    def __init__(self, change):
        super().__init__(3, 1)
        self.change, self.scale = change, nn.Parameter(torch.ones(3))
        self.register_buffer("codes", torch.zeros(3))

    def forward(self, x):
        with torch.no_grad():
            self.change(self, x)
        return super().forward(x * self.scale)


def _changed_in_calls(change, warned=None):
    """Return a function that trains a model that changes in its calls, with a warning that matches `warned`."""

    def commit():
        model = _Changing(change)
        parts = model, torch.optim.SGD(model.parameters(), lr=0.01), small.parts()[2]
        with pytest.warns(NanoWarning, match=warned) if warned else nullcontext():
            nano(**OPTIONS)(small.fit)(*parts)

    return commit


def _set_scale(model, x):
    model.scale.copy_(x.mean(0))


def _set_codes(model, x):
    model.codes.copy_(x.mean(0))


def _gradients_by_hand(in_place):
    def fit(model, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            gradient = (x * (model(x) - y).sign()).mean(0, keepdim=True).detach()
            model.weight.grad = model.weight.grad.copy_(gradient) if in_place else gradient
            optimizer.step()

    return lambda: nano(**OPTIONS)(fit)(*small.parts())


def _by_autograd_grad():
    """Train with gradients that are not averaged."""

    def fit(model, optimizer, loader):
        for x, y in loader:
            gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), y), [*model.parameters()])
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.1)

    nano(**OPTIONS)(fit)(*small.parts())


def _trained_in_a_forked_child(model, optimizer, loader):
    if small.rank() == 0:
        child = os.fork()
        if child == 0:
            os._exit(0 if small.fit(model, optimizer, loader) == 16 else 1)
        assert os.waitpid(child, 0)[1] == 0
    return small.fit(model, optimizer, loader)


def _one_step_more(rank):
    def fit(model, optimizer, loader):
        small.fit(model, optimizer, loader, epochs=1)
        if small.rank() == rank:
            model(torch.ones(1, 3)).sum().backward()

    return lambda: nano(**OPTIONS)(fit)(*small.parts())


def _iterating_alone(rank, *, gradients=True, then=lambda: None):
    """Return a function that trains, and then iterates over a shuffled loader on one rank."""

    def fit(model, optimizer, loader):
        steps = small.fit(model, optimizer, loader, epochs=1)
        with torch.set_grad_enabled(gradients):
            if small.rank() == rank:
                assert len([model(x) for x, _ in loader]) == 2 * steps
        then()

    def commit():
        model, optimizer, loader = small.parts()
        nano(**OPTIONS)(fit)(model, optimizer, DataLoader(loader.dataset, 4, shuffle=True))

    return commit


def _evaluating(rank):
    """Return a function that trains while one rank alone evaluates in mid-epoch, with gradients enabled."""

    def fit(model, optimizer, loader):
        held_out = DataLoader(loader.dataset, 4, shuffle=True)

        def each_step(*place):
            if place == (rank, 2):
                sum(nn.functional.mse_loss(model(x), y).item() for x, y in held_out)

        small.fit(model, optimizer, loader, each_step)

    return lambda: nano(**OPTIONS)(fit)(*small.parts())


def _loaders_in_another_order():
    def fit(model, optimizer, short, long):
        for loader in (short, long) if small.rank() == 0 else (long, short):
            small.fit(model, optimizer, loader, epochs=1)

    model, optimizer, loader = small.parts()
    rows = loader.dataset[: len(loader.dataset)]
    few = TensorDataset(*(each[:16] for each in rows))
    nano(**OPTIONS)(fit)(
        model, optimizer, DataLoader(few, 4, shuffle=True), DataLoader(loader.dataset, 4, shuffle=True)
    )


def _rate(rank, model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)


def _frozen(rank, model, optimizer):
    model.bias.requires_grad_(rank == 0)


def _nan(rank, model, optimizer):
    if rank == 1:
        model.register_forward_hook(lambda module, given, out: out * float("nan"))


def _made_inside(make):
    class Loop(TorchNano):
        def train(self):
            model, optimizer = self.setup(*make(self.global_rank))
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    return lambda: Loop(**OPTIONS).train()


def _nothing_set_up():
    class Loop(TorchNano):
        def train(self, *parts):
            small.fit(*parts)

    Loop(**OPTIONS).train(*small.parts())


def _with_optimizer(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class _Uneven(IterableDataset):
    def __iter__(self):
        rank = small.rank()
        return iter([(torch.full((3,), float(rank)), torch.ones(1))] * (8 + 8 * rank))


def _different_lengths():
    def fit(model, optimizer):
        return small.fit(model, optimizer, DataLoader(_Uneven(), 4), epochs=1)

    model, optimizer, _ = small.parts()
    nano(**OPTIONS)(fit)(model, optimizer)


def _groups_in_another_order(rank):
    groups = [distributed.new_group([0, 1]) for _ in range(2)]
    for group in groups[:: -1 if rank else 1]:
        distributed.all_reduce(torch.ones(1), group=group)


FAULTS = [
    Fault("rank 0 leaves the loop early", _leaving(0, 2)),
    Fault("rank 1 leaves the loop early", _leaving(1, 2), quick=True),
    Fault("rank 1 leaves the loop of a TorchNano early", lambda: _Leaving(**OPTIONS).train(*small.parts())),
    Fault("rank 1 leaves the loop early, and ranks share each batch", _leaving(1, 2, split_batches=True)),
    Fault(
        "rank 1 takes another batch, and ranks share each batch",
        lambda: nano(**OPTIONS, split_batches=True)(small.fit)(*_of_another_order(1)),
    ),
    Fault("rank 0 alone computes a cross-entropy of its part of a shared batch", _logging(0)),
    Fault("rank 0 takes one step more", _one_step_more(0)),
    Fault("rank 1 takes one step more", _one_step_more(1)),
    Fault("rank 0 calls a collective more", on(0, collective)),
    Fault("rank 1 calls a collective more", on(1, collective)),
    Fault("rank 0 alone iterates a loader that is divided", _iterating_alone(0)),
    Fault(
        "rank 1 alone iterates a loader that is divided, and rank 0 is in a barrier",
        _iterating_alone(1, then=nano_loop.barrier),
        quick=True,
    ),
    Fault(
        "rank 0 alone iterates a loader under torch.no_grad()",
        _iterating_alone(0, gradients=False, then=nano_loop.barrier),
    ),
    Fault("rank 0 alone evaluates during an epoch, with gradients enabled", _evaluating(0), quick=True),
    Fault("rank 1 alone evaluates during an epoch, with gradients enabled", _evaluating(1)),
    Fault("ranks iterate two loaders in another order", _loaders_in_another_order),
    Fault(
        "ranks call a collective with other sizes",
        on_each(lambda rank: distributed.all_reduce(torch.ones(1 + rank * 1000))),
        quick=True,
    ),
    Fault("ranks call collectives of two groups in different orders", on_each(_groups_in_another_order)),
    Fault("ranks have other learning rates", _loop(_rate), quick=True),
    Fault("a rank overwrites its own weights", _overwriting(OPTIONS), quick=True),
    Fault(
        "a rank overwrites its own weights, with compare_parameters=False",
        _overwriting({**OPTIONS, "compare_parameters": False}),
    ),
    Fault("a call into the model sets a parameter by its batch", _changed_in_calls(_set_scale), quick=True),
    Fault(
        "a call into the model sets a buffer by its batch",
        _changed_in_calls(_set_codes, "_Changing.codes is no longer the same on all ranks"),
    ),
    Fault("the loop replaces the averaged gradients", _gradients_by_hand(in_place=False)),
    Fault("the loop overwrites the averaged gradients", _gradients_by_hand(in_place=True)),
    Fault("the loop applies gradients of torch.autograd.grad itself", _by_autograd_grad, quick=True),
    Fault("rank 0 forks a child that trains", lambda: nano(**OPTIONS)(_trained_in_a_forked_child)(*small.parts())),
    Fault("a layer is frozen on one rank", _loop(_frozen)),
    Fault("the loss of one rank is NaN", _loop(_nan)),
    Fault("several ranks set nothing up", _nothing_set_up),
    Fault(
        "ranks set up models with other numbers of parameters",
        _made_inside(lambda rank: _with_optimizer(nn.Linear(3, 1, bias=rank == 0))),
    ),
    Fault("ranks set up models of other shapes", _made_inside(lambda rank: _with_optimizer(nn.Linear(3, 1 + rank)))),
    Fault(
        "ranks set up models of other dtypes",
        _made_inside(lambda rank: _with_optimizer(nn.Linear(3, 1, dtype=(torch.float32, torch.float64)[rank]))),
    ),
    Fault("streams of ranks have other lengths", _different_lengths),
    Fault("timeout=1e15", on_each(lambda rank: None, timeout=1e15)),
    Fault("timeout=0.5, which is enough", on_each(lambda rank: None, timeout=0.5)),
    Fault("num_processes=99", on_each(lambda rank: None, num_processes=99, cpu_for_each_process=None)),
]
