"""Loops whose batches are not passed to `setup`: what can be divided is, and what cannot is named."""

import linecache
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset

from distributed import small
from nano_loop import NanoWarning, TorchNano, nano
from nano_loop.patching import user_code

pytestmark = pytest.mark.usefixtures("nothing_left")

RAMPING = small.OPTIONS | {"auto_lr": True}
EPOCHS = 20
MADE_AT_IMPORT = small.parts()[2]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    """Let this process have given no warning, which it would not repeat."""
    monkeypatch.setattr(user_code, "_warned", set())


def rows():
    return small.parts()[2].dataset.tensors


def rank_and_size():
    return (small.rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def loader_made_inside(model, optimizer, batch_size=4):
    loader = DataLoader(small.parts()[2].dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(1))
    held = DataLoader(loader.dataset, batch_size)
    for _ in range(EPOCHS):
        for x, y in loader:
            step(model, optimizer, x, y)
        model.eval()
        count = sum(len(x) for x, _ in held)
        model.train()
    return count


def batches_of_rank(model, optimizer):
    rank, size = rank_and_size()
    x, y = rows()
    for _ in range(EPOCHS):
        for first in range(0, len(x), 8):
            step(model, optimizer, x[first : first + 8][rank::size], y[first : first + 8][rank::size])


def batches_by_hand(model, optimizer):
    x, y = rows()
    for _ in range(EPOCHS):
        for first in range(0, len(x), 8):
            step(model, optimizer, x[first : first + 8], y[first : first + 8])


def an_iterator_of_its_own(model, optimizer):
    def batches():
        yield from zip(*(tensor.split(8) for tensor in rows()), strict=True)

    for _ in range(EPOCHS):
        for x, y in batches():
            step(model, optimizer, x, y)


def one_graph(model, optimizer):
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        x, y = rows()
        nn.functional.mse_loss(model(x)[:20], y[:20]).backward()
        optimizer.step()


class OneGraph(TorchNano):
    """Sets no loader up."""

    def train(self, model, optimizer):
        one_graph(*self.setup(model, optimizer))


def global_loader(model, optimizer):
    return small.fit(model, optimizer, MADE_AT_IMPORT)


def run(train, *args):
    """Train, and return the weights, the result and the warnings."""
    model, optimizer, _ = small.parts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(model, optimizer, *args)
    return small.weights(model), result, caught


def test_ranks_with_a_loader_of_the_loop_train_as_one_process_of_twice_the_batch_would():
    train = nano(**small.OPTIONS)(loader_made_inside)
    weights, count, caught = run(train)
    plain, plain_count, _ = run(loader_made_inside, 8)
    torch.testing.assert_close(weights, plain, rtol=1e-6, atol=1e-6)
    assert count == plain_count == 32  # the evaluation was whole
    assert "not set up, by batch" in str(train.report)
    assert not caught


def trained_as_plain_and_warned(loop, train):
    weights, _, (one,) = run(train)
    plain, *_ = run(loop)
    torch.testing.assert_close(weights, plain, rtol=1e-6, atol=1e-6)
    assert one.category is NanoWarning
    assert str(one.message).startswith("each of the 2 ranks computes the same batches")
    assert Path(one.filename) == Path(__file__)
    assert ".backward()" in linecache.getline(__file__, one.lineno)


def test_batches_by_hand_train_at_the_plain_rate_and_are_warned_of_once():
    train = nano(**RAMPING)(batches_by_hand)
    trained_as_plain_and_warned(batches_by_hand, train)
    assert train.report["learning_rate"].status == "skipped"


@pytest.mark.slow
@pytest.mark.parametrize("loop", [an_iterator_of_its_own, one_graph])
def test_other_work_that_is_not_divided_is_warned_of_too(loop):
    trained_as_plain_and_warned(loop, nano(**RAMPING)(loop))


@pytest.mark.slow
def test_loop_that_sets_no_loader_up_is_warned_of_too():
    trained_as_plain_and_warned(one_graph, OneGraph(**RAMPING).train)


class StreamOfRank(IterableDataset):
    def __iter__(self):
        rank, size = rank_and_size()
        return iter([*range(16)][rank::size])


def test_stream_that_asks_for_its_rank_is_read_whole_once_where_its_loader_is_an_argument():
    def fit(model, optimizer, loader):
        taken = []
        for x in loader:
            step(model, optimizer, x.float()[:, None].expand(-1, 3), torch.zeros(len(x), 1))
            taken += x.tolist()
        gathered = [None, None]
        distributed.all_gather_object(gathered, taken)
        return gathered

    model, optimizer, _ = small.parts()
    train = nano(**small.OPTIONS)(fit)
    assert train(model, optimizer, DataLoader(StreamOfRank(), 4)) == [[*range(0, 16, 2)], [*range(1, 16, 2)]]
    assert train.report["loaders"].code == "divided_by_program"


def test_global_loader_is_divided():
    _, steps, caught = run(nano(**small.OPTIONS)(global_loader))
    assert steps == run(global_loader)[1] / 2
    assert not caught


def test_batches_of_each_rank_keep_the_ramp_from_call_to_call_and_are_not_warned_of():
    train = nano(**RAMPING)(batches_of_rank)

    def twice(model, optimizer):
        for _ in range(2):
            train(model, optimizer)

    weights, _, caught = run(twice)
    model, optimizer, _ = small.parts()
    x, y = rows()
    for number in range(2 * EPOCHS * 4):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + number / 1000)
        first = number % 4 * 8
        step(model, optimizer, x[first : first + 8], y[first : first + 8])
    torch.testing.assert_close(weights, small.weights(model), rtol=1e-6, atol=1e-6)
    assert not caught
