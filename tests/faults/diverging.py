"""Faults: ranks that part: they take other steps, or have other models, rates and data."""

import os
from contextlib import nullcontext

import pytest
import torch
from distributed import small
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import nano_loop
from faults.fault import BEFORE, COLLECTIVE, EPOCH, FIRST, LAST, Fault
from faults.runs import OPTIONS, collective, on, on_each
from nano_loop import NanoConfigError, NanoError, NanoWarning, TorchNano, nano


def _loop(change, *, parts=small.parts):
    """Return what trains, after ``change(rank, model, optimizer)``."""

    def fit(model, optimizer, loader):
        change(small.rank(), model, optimizer)
        return small.fit(model, optimizer, loader)

    return lambda: nano(**OPTIONS)(fit)(*parts())


def _leaving(rank, step, **options):
    """Return what trains, with one rank that leaves the loop before a step."""

    def fit(model, optimizer, loader):
        for number, (x, y) in enumerate(loader):
            if (small.rank(), number) == (rank, step):
                return
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    return lambda: nano(**OPTIONS | options)(fit)(*small.parts())


def _logging(rank):
    """Return what trains on shared batches, and computes a loss of its part on one rank alone."""

    def fit(model, optimizer, loader):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x).expand(-1, 2), (y > 1.5).squeeze(1).long())
            if small.rank() == rank:
                nn.functional.cross_entropy(model(x).expand(-1, 2), (y > 1.5).squeeze(1).long()).item()
            loss.backward()
            optimizer.step()

    return lambda: nano(**OPTIONS, split_batches=True)(fit)(*small.parts())


class _Leaving(TorchNano):
    def train(self, model, optimizer, loader):
        model, optimizer, loader = self.setup(model, optimizer, loader)
        for number, (x, y) in enumerate(loader):
            if (self.global_rank, number) == (1, 2):
                return
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


def _overwriting(options):
    """Return what trains for some epochs, with a rank that has lost its weights."""

    def fit(model, optimizer, loader):
        if small.rank() == 1:
            nn.init.zeros_(next(model.parameters()))
        return small.fit(model, optimizer, loader, epochs=10)

    return lambda: nano(**options)(fit)(*small.parts())


class _Changing(nn.Linear):
    """Changes itself in each call, by its batch."""

    def __init__(self, change):
        super().__init__(3, 1)
        self.change, self.scale = change, nn.Parameter(torch.ones(3))
        self.register_buffer("codes", torch.zeros(3))

    def forward(self, x):
        with torch.no_grad():
            self.change(self, x)
        return super().forward(x * self.scale)


def _changed_in_calls(change, warned=None):
    """Return what trains a model that changes itself in calls, with a warning that matches `warned`."""

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


def _without_averaging(update):
    """Return what trains by gradients that `update` takes and applies itself."""

    def fit(model, optimizer, loader):
        for x, y in loader:
            update(model, x, y)

    return lambda: nano(**OPTIONS)(fit)(*small.parts())


def _by_autograd_grad(model, x, y):
    gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), y), [*model.parameters()])
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)


def _by_functions(model, x, y):
    def loss(parameters):
        return nn.functional.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = torch.func.grad(loss)(before)
    model.load_state_dict({name: value - 0.1 * gradients[name] for name, value in before.items()})


def _trained_in_a_forked_child(model, optimizer, loader):
    """Train, with a child of rank 0 that trains by itself before."""
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
    """Return what trains, and then iterates a shuffled loader on one rank."""

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


def _evaluating(rank, *, at=2):
    """Return what trains, and lets one rank alone evaluate in mid-epoch, with gradients on."""

    def fit(model, optimizer, loader):
        held_out = DataLoader(loader.dataset, 4, shuffle=True)
        for number, (x, y) in enumerate(loader):
            if (small.rank(), number) == (rank, at):
                sum(nn.functional.mse_loss(model(x), y).item() for x, y in held_out)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    return lambda: nano(**OPTIONS)(fit)(*small.parts())


def _loaders_in_another_order():
    """Let ranks iterate loaders of different lengths."""

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


def _mismatched():
    distributed.all_reduce(torch.ones(1 + small.rank() * 1000))


def _groups_in_another_order(rank):
    groups = [distributed.new_group([0, 1]) for _ in range(2)]
    for group in groups[:: -1 if rank else 1]:
        distributed.all_reduce(torch.ones(1), group=group)


def _timeout(value):
    return lambda: on_each(lambda rank: None, timeout=value)()


def _left(rank, **settings):
    return Fault(
        f"rank {rank} leaves the loop early",
        EPOCH,
        _leaving(rank, 2),
        words=(
            f"rank {rank} has returned from fit, and rank {1 - rank} still averages gradients",
            "same number of steps",
            "nano_loop.broadcast(stop) or nano_loop.all_reduce(loss)",
            f"rank {1 - rank}:",
            "in fit",
            "mse_loss(model(x), y).backward()",
        ),
        **settings,
    )


FAULTS = [
    _left(0),
    _left(1, quick=True),
    Fault(
        "rank 1 leaves the loop of a TorchNano early",
        EPOCH,
        lambda: _Leaving(**OPTIONS).train(*small.parts()),
        words=("rank 1 has returned from train", "self.broadcast(stop) or self.all_reduce(loss)"),
    ),
    Fault(
        "rank 1 leaves a loop early whose ranks share each batch",
        EPOCH,
        _leaving(1, 2, split_batches=True),
        words=("rank 1 has returned from fit", "same number of steps"),
    ),
    Fault(
        "rank 0 alone computes a cross-entropy of its part of a shared batch",
        FIRST,
        _logging(0),
        NanoError,
        ("rank 0 is in a collective (a mean of cross-entropy) that rank 1 is not in", "under torch.no_grad()"),
    ),
    Fault("rank 0 takes one step more", LAST, _one_step_more(0), words=("rank 1 has returned from fit",)),
    Fault("rank 1 takes one step more", LAST, _one_step_more(1), words=("rank 0 has returned from fit",)),
    Fault(
        "rank 0 calls a collective more",
        COLLECTIVE,
        on(0, collective),
        words=("rank 1 has returned from loop", "same number of steps"),
    ),
    Fault(
        "rank 1 calls a collective more",
        COLLECTIVE,
        on(1, collective),
        words=("rank 0 has returned from loop", "same number of steps"),
    ),
    Fault(
        "rank 0 alone iterates a loader that is divided",
        LAST,
        _iterating_alone(0),
        words=("rank 1 has returned from fit, and rank 0 iterates a loader", "torch.no_grad()", "for x, _ in loader"),
    ),
    Fault(
        "rank 1 alone iterates a loader that is divided, and rank 0 is in a barrier",
        COLLECTIVE,
        _iterating_alone(1, then=nano_loop.barrier),
        NanoError,
        ("rank 1 iterates a loader, and rank 0 does not", "torch.no_grad()", "rank 0:", "then()", "for x, _ in loader"),
        quick=True,
    ),
    Fault(
        "rank 0 alone iterates a loader under torch.no_grad()",
        LAST,
        _iterating_alone(0, gradients=False, then=nano_loop.barrier),
        None,
        result="training goes on: rank 0 takes all batches",
    ),
    Fault(
        "rank 0 alone evaluates in mid-epoch, with gradients on",
        EPOCH,
        _evaluating(0),
        NanoError,
        ("rank 0 iterates a loader, and rank 1 does not", "torch.no_grad()", "rank 0:", "for x, y in held_out"),
        quick=True,
    ),
    Fault(
        "rank 1 alone evaluates in mid-epoch, with gradients on",
        EPOCH,
        _evaluating(1),
        NanoError,
        ("rank 1 iterates a loader, and rank 0 does not", "torch.no_grad()", "rank 0:", "backward()"),
    ),
    Fault(
        "ranks iterate two loaders in another order",
        EPOCH,
        _loaders_in_another_order,
        NanoError,
        ("iterate different set-up loaders", "rank 0 loader 1, rank 1 loader 2", "in the same order on every rank"),
    ),
    Fault(
        "ranks call a collective with other sizes",
        COLLECTIVE,
        on_each(lambda rank: _mismatched()),
        NanoError,
        ("rank 0 is in a collective (SUM of 1 torch.float32) that rank 1 is not in", "the same shape and dtype"),
    ),
    Fault(
        "ranks call collectives of two groups in another order",
        COLLECTIVE,
        on_each(_groups_in_another_order),
        NanoError,
        ("ranks 0, 1 wait for each other", "in the same order", "rank 0:", "rank 1:"),
    ),
    Fault(
        "ranks have other learning rates",
        FIRST,
        _loop(_rate),
        words=("learning rates differ", "rank 0 has [0.1], rank 1 has [0.05]"),
        quick=True,
    ),
    Fault(
        "a rank overwrites its own weights",
        FIRST,
        _overwriting(OPTIONS),
        words=("Linear.weight is not the same on all ranks", "load a checkpoint on all of them"),
        quick=True,
    ),
    Fault(
        "a rank overwrites its own weights, with compare_parameters=False",
        FIRST,
        _overwriting({**OPTIONS, "compare_parameters": False}),
        None,
        result="training goes on",
    ),
    Fault(
        "a call into the model sets a parameter by its batch",
        FIRST,
        _changed_in_calls(_set_scale),
        words=("_Changing.scale is not the same on all ranks", "once before the run"),
        quick=True,
    ),
    Fault(
        "a call into the model sets a buffer by its batch",
        FIRST,
        _changed_in_calls(_set_codes, "_Changing.codes is no longer the same on all ranks"),
        None,
        result="training goes on, and a `NanoWarning` names the buffer",
    ),
    Fault(
        "the loop puts other gradients in the place of the averaged ones",
        FIRST,
        _gradients_by_hand(in_place=False),
        None,
        result="training goes on: they are averaged",
    ),
    Fault(
        "the loop overwrites the averaged gradients",
        FIRST,
        _gradients_by_hand(in_place=True),
        words=("Linear.weight is not the same on all ranks",),
    ),
    Fault(
        "the loop applies gradients of torch.autograd.grad itself",
        LAST,
        _without_averaging(_by_autograd_grad),
        words=("Linear.weight is not the same on all ranks",),
        quick=True,
    ),
    Fault(
        "the loop applies gradients of torch.func.grad itself",
        LAST,
        _without_averaging(_by_functions),
        words=("Linear.weight is not the same on all ranks",),
    ),
    Fault(
        "rank 0 forks a child that trains",
        FIRST,
        lambda: nano(**OPTIONS)(_trained_in_a_forked_child)(*small.parts()),
        None,
        result="training goes on: the child trains by itself",
    ),
    Fault("a layer is frozen on one rank", FIRST, _loop(_frozen), None, result="training goes on: its gradient counts"),
    Fault(
        "the loss of one rank is NaN",
        FIRST,
        _loop(_nan),
        None,
        result="training goes on, with NaN in every gradient, as in one process",
    ),
    Fault(
        "several ranks set nothing up",
        FIRST,
        _nothing_set_up,
        NanoError,
        ("the loop steps SGD", "was set up", "only rank 0's model is kept", "self.setup"),
    ),
    Fault(
        "ranks set up models with other numbers of parameters",
        FIRST,
        _made_inside(lambda rank: _with_optimizer(nn.Linear(3, 1, bias=rank == 0))),
        NanoError,
        ("rank 1 has SGD", "where rank 0 has Linear.bias", "Build them the same way on every rank"),
    ),
    Fault(
        "ranks set up models of other shapes",
        FIRST,
        _made_inside(lambda rank: _with_optimizer(nn.Linear(3, 1 + rank))),
        NanoError,
        ("rank 1 has Linear.weight", "(2, 3)", "where rank 0", "(1, 3)"),
    ),
    Fault(
        "ranks set up models of other dtypes",
        FIRST,
        _made_inside(lambda rank: _with_optimizer(nn.Linear(3, 1, dtype=(torch.float32, torch.float64)[rank]))),
        NanoError,
        ("rank 1 has Linear.weight, torch.float64", "where rank 0", "torch.float32"),
    ),
    Fault("streams of ranks have other lengths", LAST, _different_lengths, words=("rank 0 has returned from fit",)),
    Fault("timeout=inf", BEFORE, _timeout(float("inf")), NanoConfigError, ("timeout=inf", "positive")),
    Fault("timeout=nan", BEFORE, _timeout(float("nan")), NanoConfigError, ("timeout=nan", "positive")),
    Fault("timeout=-1", BEFORE, _timeout(-1), NanoConfigError, ("timeout=-1", "positive"), quick=True),
    Fault("timeout=0", BEFORE, _timeout(0), NanoConfigError, ("timeout=0", "positive")),
    Fault("timeout=1e15", BEFORE, _timeout(1e15), NanoConfigError, ("timeout=", "seconds", "Omit it")),
    Fault("timeout='long'", BEFORE, _timeout("long"), NanoConfigError, ("timeout='long'", "positive")),
    Fault("timeout=0.5, which is enough", FIRST, on_each(lambda rank: None, timeout=0.5), None),
    Fault(
        "num_processes=99",
        BEFORE,
        on_each(lambda rank: None, num_processes=99, cpu_for_each_process=None),
        NanoConfigError,
        ("num_processes=99", "99 physical cores", "Lower num_processes"),
    ),
]
