"""Loops over large embeddings match the same loop with the same fused optimizer and torch's gradients bit for bit."""

import copy
import ctypes
import tempfile
from contextlib import contextmanager

import numpy
import pytest
import torch
import torch.nn.functional as F
from kernels.differentiated import group_of_one
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from nano_loop import accelerated
from nano_loop.kernels import embedding
from nano_loop.optimizers import row_steps
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.patch_table import left_by_runs

pytestmark = [
    pytest.mark.skipif(embedding.KERNEL.unavailable is not None, reason=str(embedding.KERNEL.unavailable)),
    pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9"),
]
ROWS, STEPS = 61, 7


@pytest.fixture(autouse=True)
def every_table_is_large(monkeypatch):
    monkeypatch.setattr(embedding, "MIN_ELEMENTS", 1)


class Pairs(nn.Module):
    """Scores of users' items, from two tables, one of which is used twice."""

    def __init__(self, width=16):
        super().__init__()
        self.users, self.items = nn.Embedding(ROWS, width), nn.Embedding(ROWS, width, padding_idx=3)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, words):
        user, item, other = self.users(words[:, 0]), self.items(words[:, 1]), self.items(words[:, 2])
        return ((item - other) * (user + self.bias)).sum(1)


class Bags(nn.Module):
    """Sums or means of bags of words, in the forms that torch accepts: of equal sizes, and by offsets."""

    def __init__(self, mode, **options):
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 16, mode=mode, **options)

    def forward(self, words):
        offsets = torch.tensor([0, 3, 3, 8])
        return self.table(words).sum(1).mean() + self.table(words.flatten(), offsets)[1:].square().mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, 16)

    def forward(self, words):
        return F.linear(self.table(words), self.table.weight).square().mean(-1)


class ByFunction(nn.Module):
    """Lookups by the function, with 32-bit indices and from a renormalized table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, 16) / 4)

    def forward(self, words):
        return F.embedding(words.int(), self.table) * F.embedding(words, self.table, max_norm=2.0).detach()


class InPlace(nn.Module):
    """Scales, shifts and drops the looked-up rows in place, as when positions are added."""

    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(ROWS, 16), nn.Parameter(torch.randn(1, 16))

    def forward(self, words):
        out = self.table(words).mul_(4.0)
        out += self.places
        return F.dropout(out, 0.1, inplace=True).sum(1) + self.table(words[0, 0]).neg_()


MODELS = {
    "pairs": Pairs,
    "in place": InPlace,
    "rows of 10": lambda: Pairs(10),
    "rows of 3": lambda: Pairs(3),
    "sums of bags": lambda: Bags("sum", padding_idx=5),
    "means of bags": lambda: Bags("mean"),
    "tied": Tied,
    "by function": ByFunction,
    "by frequency": lambda: nn.Embedding(ROWS, 16, scale_grad_by_freq=True),
}
OPTIMIZERS = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "Adam, decaying": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "Adam, maximized": lambda p: Adam(p, lr=0.01, betas=(0.3, 0.99), maximize=True),
    "Adam without eps": lambda p: Adam(p, lr=0.01, eps=0),
    "AMSGrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD, decaying": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "Nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.1),
    "RMSprop": lambda p: RMSprop(p, lr=0.01),
}
#: The optimizers that step by rows.
BY_ROWS = {"Adam", "Adam, maximized", "AdamW", "SGD", "momentum", "Nesterov", "Adagrad"}


def plainly(model, optimizer, words, number):
    optimizer.zero_grad()
    model(words).square().mean().backward()
    optimizer.step()


def accumulating(model, optimizer, words, number):
    if number % 2 == 0:
        optimizer.zero_grad()
    for part in words.chunk(2):
        model(part).mean().backward()
    optimizer.step()


def clipping(model, optimizer, words, number):
    optimizer.zero_grad()
    model(words).square().mean().backward()
    if number % 3 == 2:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def keeping(model, optimizer, words, number, kept=[]):  # noqa: B006
    plainly(model, optimizer, words, number)
    assert all(torch.equal(gradient, before) for gradient, before in kept)
    if number % 3 == 1:
        kept[:] = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]


def skipping_steps(model, optimizer, words, number):
    optimizer.zero_grad()
    model(words).square().mean().backward()
    if number % 2:
        optimizer.step()


def twice_backward(model, optimizer, words, number):
    optimizer.zero_grad()
    loss = model(words).square().mean()
    loss.backward(retain_graph=True)
    if number % 2:
        loss.backward()
    optimizer.step()


def with_hooks(model, optimizer, words, number):
    parameter = next(model.parameters())
    handle = parameter.register_hook(lambda gradient: gradient.data.mul_(2) if number == 2 else gradient * 2)
    plainly(model, optimizer, words, number)
    handle.remove()


def penalizing(model, optimizer, words, number):
    optimizer.zero_grad()
    loss = model(words).square().mean()
    (gradient,) = torch.autograd.grad(loss, [next(model.parameters())], create_graph=True)
    (loss + gradient.square().sum()).backward()
    optimizer.step()


def by_hand_between(model, optimizer, words, number):
    plainly(model, optimizer, words, number)
    if number % 2:
        parameter = next(model.parameters())
        (gradient,) = torch.autograd.grad(model(words).sum(), [parameter])
        gradient.data.mul_(-0.1)
        parameter.data.add_(gradient)


def restoring_the_state_by_hand(model, optimizer, words, number):
    if number == 1:
        restoring_the_state_by_hand.saved = copy.deepcopy(optimizer.state_dict()["state"])
    if number == 4:
        for parameter, saved in zip(
            optimizer.param_groups[0]["params"], restoring_the_state_by_hand.saved.values(), strict=True
        ):
            for name, value in saved.items():
                optimizer.state[parameter][name].data.copy_(value).add_(0.1)
    plainly(model, optimizer, words, number)


def writing_into_a_mapped_checkpoint(model, optimizer, words, number, folder=[]):  # noqa: B006
    plainly(model, optimizer, words, number)
    if number == 2:
        folder[:] = [tempfile.TemporaryDirectory()]
        torch.save(optimizer.state_dict(), f"{folder[0].name}/state.pt")
        optimizer.load_state_dict(torch.load(f"{folder[0].name}/state.pt", mmap=True))
    if number == 4:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.data[13] = 0.5
        folder.pop().cleanup()


def adding_a_group(model, optimizer, words, number):
    if number == 0:
        first, *_ = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"].remove(first)
        adding_a_group.first = first
    if number == 3:
        optimizer.add_param_group({"params": [adding_a_group.first], "lr": 0.3})
    model.zero_grad()
    model(words).square().mean().backward()
    optimizer.step()


def states_in_one_memory(model, optimizer, words, number):
    plainly(model, optimizer, words, number)
    if number == 2:
        tables = [model.users.weight, model.items.weight]
        names = [name for name, value in optimizer.state[tables[0]].items() if value is not None and value.dim()]
        places = [(optimizer.state[table], name) for table in tables for name in names]
        memory = torch.stack([state[name] for state, name in places])
        for (state, name), part in zip(places, memory, strict=True):
            state[name] = part


def in_two_losses(model, optimizer, words, number):
    optimizer.zero_grad()
    losses = [model(part).square().mean() for part in words.chunk(2)]
    sum(losses).backward()
    optimizer.step()


LOOPS = (
    *(plainly, accumulating, clipping, keeping, skipping_steps, twice_backward, with_hooks, penalizing),
    *(by_hand_between, restoring_the_state_by_hand, writing_into_a_mapped_checkpoint),
    *(states_in_one_memory, adding_a_group, in_two_losses),
)


@contextmanager
def row_steps_counted():
    """Yield a list that grows by one with each step by rows."""
    taken, original = [], row_steps.RowStep.__call__

    def counted(self):
        taken.append(self.rule)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_steps.RowStep, "__call__", counted)
        yield taken


def trained(make_model, make_optimizer, loop, **options):
    """Return all results of a loop, and the number of steps by rows."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    with row_steps_counted() as taken, accelerated(model, optimizer, verbose=False, **options):
        for number in range(STEPS):
            loop(model, optimizer, torch.randint(ROWS, (12, 3)), number)
        gradients = [parameter.grad for parameter in model.parameters()]
    assert left_by_runs() == {}
    state = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [*model.parameters(), *gradients, *state], len(taken)


def assert_equal(make_model, make_optimizer, loop):
    results, taken = trained(make_model, make_optimizer, loop)
    expected, none = trained(make_model, make_optimizer, loop, fast_embedding=False)
    assert len(results) == len(expected)
    for one, other in zip(results, expected, strict=True):
        assert (one is None) == (other is None)
        one, other = (torch.as_tensor(0 if value is None else value).to_dense() for value in (one, other))
        assert one.allclose(other, rtol=0, atol=0, equal_nan=True)
    assert none == 0
    return counted_where_torch_computes_alike(taken)


def counted_where_torch_computes_alike(taken):
    if not row_steps.rounds_as_torch():
        pytest.skip("the CPU has kernels of torch that compute steps otherwise, as ARM: torch takes them")
    return taken


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["pairs", "rows of 10"])
def test_optimizers_step_rows_to_the_bit(model, optimizer):
    taken = assert_equal(MODELS[model], OPTIMIZERS[optimizer], plainly)
    assert (taken > STEPS) == (optimizer in BY_ROWS)  # two tables, and the first step is torch's


@pytest.mark.parametrize("model", MODELS)
def test_models_have_torchs_gradients(model):
    taken = assert_equal(MODELS[model], OPTIMIZERS["Adam"], plainly)
    assert bool(taken) == (model not in ("tied", "means of bags", "by frequency"))


@pytest.mark.parametrize("optimizer", ["AdamW", "momentum", "Adagrad"])
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_that_touch_gradients_and_state_are_the_same(loop, optimizer):
    taken = assert_equal(Pairs, OPTIMIZERS[optimizer], loop)
    assert taken or loop in (accumulating, twice_backward)


@pytest.mark.parametrize("first", ["Adam", "momentum"])
def test_an_optimizer_without_states_follows_one_with_states(first):
    others = []

    def loop(model, optimizer, words, number):
        if number == 0:
            others[:] = [OPTIMIZERS["SGD"](model.parameters())]
        plainly(model, others[0] if number in (3, 6) else optimizer, words, number)

    assert assert_equal(Pairs, OPTIMIZERS[first], loop)


#: Writes that do not increase the tensor's version.
WRITES = {
    "decay": lambda p, value: value.data.add_(p.data, alpha=0.1),
    "noise": lambda p, value: value.data.add_(torch.rand(value.shape)),
    "one row": lambda p, value: value.data.__setitem__(7, 1.0),
    "a view": lambda p, value: value.data.view(-1)[100:105].fill_(1.0),
    "numpy": lambda p, value: value.numpy().__setitem__(7, 1.0),
    "an array": lambda p, value: numpy.asarray(value).__setitem__(7, 1.0),
    "DLPack": lambda p, value: torch.from_dlpack(value).__setitem__(7, 1.0),
    "the address": lambda p, value: ctypes.c_float.from_address(value.data_ptr() + 7 * 64).__setattr__("value", 1.0),
    "the storage": lambda p, value: value.untyped_storage().copy_(torch.rand(value.shape).untyped_storage()),
    "data of another tensor": lambda p, value: setattr(value, "data", torch.rand(value.shape)),
    "an operator with out": lambda p, value: torch.add(p.data, 1.0, out=value.data),
    "operators of lists": lambda p, value: torch._foreach_add_([value.data], 1.0),
    "an average of one process": lambda p, value: averaged(value.data),
    "a list of numbers": lambda p, value: value.data.copy_(torch.tensor([[*map(float, range(16))]])),
}


def averaged(value):
    """Write the mean over a group in which another rank has summed, as torch's tutorial averages."""
    torch.distributed.all_reduce(value)
    value += 1.0


@pytest.mark.parametrize(
    ("write", "optimizer"), [*((write, "AdamW") for write in WRITES), ("decay", "momentum"), ("numpy", "Adagrad")]
)
def test_writes_that_raise_no_version_are_noticed(write, optimizer):
    def loop(model, optimizer, words, number):
        written = [model.users.weight, model.items.weight]
        optimizer.zero_grad()
        model(words).square().mean().backward()
        if number == 2:
            for parameter in written:
                WRITES[write](parameter, parameter.grad)
        optimizer.step()
        if number == 3:
            for parameter in written:
                WRITES[write](parameter, parameter.grad)
        if number == 5:
            for parameter in written:
                state = optimizer.state[parameter]
                WRITES[write](parameter, next(value for name, value in state.items() if name != "step"))

    with group_of_one():
        assert assert_equal(Pairs, OPTIMIZERS[optimizer], loop)


def test_gradients_may_become_sparse():
    def loop(model, optimizer, words, number):
        model.users.sparse = number > 2
        optimizer.zero_grad()
        model(words).square().mean().backward()
        nn.utils.clip_grad_norm_(model.items.parameters(), 0.1)
        if number > 2:
            with pytest.raises(NotImplementedError, match="linalg_vector_norm"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    assert_equal(Pairs, OPTIMIZERS["SGD"], loop)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("kind", [Adam, lambda p, **options: SGD(p, 0.1, momentum=0.9, **options)])
def test_versions_rise_as_in_torchs_loop(kind, fused):
    torch.manual_seed(0)
    model = Pairs()
    optimizer = kind(model.parameters(), fused=fused)
    with row_steps_counted() as taken, accelerated(model, optimizer, verbose=False):
        for number in range(STEPS):
            states = [value for state in optimizer.state.values() for value in state.values() if number > 1]
            tensors = [model.users.weight, model.items.weight, *(each for each in states if each.dim())]
            before = [each._version for each in tensors]
            plainly(model, optimizer, torch.randint(ROWS, (12, 3)), number)
            assert [each._version > version for each, version in zip(tensors, before, strict=True)] == (
                [fused is None] * len(tensors)
            )
    assert counted_where_torch_computes_alike(len(taken)) > STEPS


def test_the_table_that_a_loop_drops_is_freed():
    with accelerated(nn.Linear(2, 2), verbose=False) as run:
        model = Pairs()
        run.setup(model, SGD(model.parameters(), lr=0.1))
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        assert embedding.row_gradient_of(model.users.weight) is not None
        key = id(model.users.weight)
        del model
        assert key not in embedding.row_gradients


def test_another_arithmetic_of_torch_is_left_to_it(monkeypatch):
    monkeypatch.setattr(row_steps, "rounds_as_torch", lambda: False)
    assert not assert_equal(Pairs, OPTIMIZERS["Adam"], plainly)
