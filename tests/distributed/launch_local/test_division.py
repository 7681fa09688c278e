"""Loops whose batches are not passed to `setup`: they are divided where possible, and reported otherwise."""

import linecache
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from distributed import small
from nano_loop import NanoWarning, nano
from nano_loop.patching import user_code

pytestmark = pytest.mark.usefixtures("nothing_left")

EPOCHS = 20


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    """Forget the warnings already shown in this process, which would not be repeated."""
    monkeypatch.setattr(user_code, "_warned", set())


def loader_made_inside(model, optimizer, batch_size=4):
    loader = DataLoader(small.parts()[2].dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(1))
    held = DataLoader(loader.dataset, batch_size)
    for _ in range(EPOCHS):
        small.fit(model, optimizer, loader, epochs=1)
        model.eval()
        count = sum(len(x) for x, _ in held)
        model.train()
    return count


def batches_by_hand(model, optimizer):
    x, y = small.parts()[2].dataset.tensors
    for _ in range(EPOCHS):
        for first in range(0, len(x), 8):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[first : first + 8]), y[first : first + 8]).backward()
            optimizer.step()


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
    assert count == plain_count == 32  # the evaluation was not divided
    assert "not set up, by batch" in str(train.report)
    assert not caught


def test_batches_by_hand_train_at_the_plain_rate_and_are_warned_of_once():
    train = nano(**small.OPTIONS | {"auto_lr": True})(batches_by_hand)
    weights, _, (one,) = run(train)
    plain, *_ = run(batches_by_hand)
    torch.testing.assert_close(weights, plain, rtol=1e-6, atol=1e-6)
    assert one.category is NanoWarning
    assert str(one.message).startswith("each of the 2 ranks computes the same batches")
    assert Path(one.filename) == Path(__file__)
    assert ".backward()" in linecache.getline(__file__, one.lineno)
    assert train.report["learning_rate"].status == "skipped"
