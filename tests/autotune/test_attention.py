"""Attention is computed in the way that is the fastest for its shape, without the loop's random numbers and hooks."""

import time

import pytest
import torch
from attending import Attending
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune.time_for import ALWAYS, TimeFor
from nano_loop import nano
from nano_loop.autotune import decisions
from nano_loop.autotune.attention import chooser
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.tuner import Tuner
from nano_loop.kernels.attention import attention as kernel
from nano_loop.kernels.attention.attention import ALGORITHMS, BLOCKS, PRODUCTS, TORCH, Arguments

ALL = [BLOCKS, PRODUCTS, TORCH]


def given(batch=2, length=40, dropout=0.0, mask=None):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(batch, 3, length, 16, generator=generator).bfloat16() for _ in range(3)]
    return Arguments(*tensors, mask, dropout, False, 0.25)


@pytest.fixture
def slow(monkeypatch):
    """Let a way take 60 milliseconds longer, and another one compute something else."""

    def change(name, wrong=False):
        original = ALGORITHMS[name]

        def changed(*args):
            time.sleep(0 if wrong else 0.06)
            return original(*args) * (1.1 if wrong else 1)

        monkeypatch.setitem(ALGORITHMS, name, changed)

    monkeypatch.setitem(ALGORITHMS, BLOCKS, ALGORITHMS[PRODUCTS])  # also where the CPU has no instructions for it
    return change


@pytest.mark.parametrize("fast", [BLOCKS, PRODUCTS, TORCH])
def test_the_fastest_way_is_kept(slow, fast):
    for name in ALL:
        if name != fast:
            slow(name)
    tuner = Tuner(Choices(None), ALWAYS)
    guess = PRODUCTS if fast != PRODUCTS else BLOCKS
    choose = chooser(tuner)
    assert {choose(given(), ALL, guess) for _ in range(3)} == {fast}
    assert tuner.measured == 1
    assert chooser(Tuner(tuner.choices, TimeFor(0.0)))(given(), ALL, guess) == fast  # as a later run


def test_wrong_way_is_rejected_and_a_way_that_does_not_fit_is_not_taken(slow):
    slow(TORCH)
    slow(PRODUCTS, wrong=True)
    tuner = Tuner(Choices(None), ALWAYS)
    assert chooser(tuner)(given(), ALL, TORCH) == BLOCKS
    assert chooser(Tuner(tuner.choices, ALWAYS))(given(), [PRODUCTS, TORCH], TORCH) == TORCH


def test_shapes_masks_and_dropouts_are_measured_apart_and_batches_together(slow):
    tuner = Tuner(Choices(None), ALWAYS)
    choose = chooser(tuner)
    mask = torch.ones(40, 40, dtype=torch.bool)
    for call in (given(), given(batch=1), given(batch=3), given(length=41), given(dropout=0.1), given(mask=mask)):
        choose(call, ALL, PRODUCTS)
    assert tuner.measured == 6  # 1, 2 and 3 to 4 sequences, and three more
    choose(given(batch=4), ALL, PRODUCTS)
    assert tuner.measured == 6


def test_shape_that_is_forgotten_until_the_recomputation_has_the_way_of_its_forward(slow, monkeypatch):
    slow(PRODUCTS)
    slow(TORCH)
    monkeypatch.setattr(decisions, "_MOST_KINDS", 1)
    choose = chooser(Tuner(Choices(None), ALWAYS))
    assert choose(given(), ALL, TORCH) == BLOCKS
    choose(given(length=41), ALL, TORCH)
    monkeypatch.setattr(decisions, "in_backward", lambda: True)
    assert choose(given(), ALL, TORCH) == BLOCKS
    assert choose(given(), [TORCH], TORCH) == TORCH
    assert choose(given(length=50), ALL, TORCH) == TORCH  # which was not measured


def test_measurements_draw_no_random_numbers_and_call_no_hooks_of_the_loop(slow):
    state = torch.get_rng_state()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda each: each), torch.no_grad():
        chooser(Tuner(Choices(None), ALWAYS))(given(dropout=0.5), ALL, PRODUCTS)
    assert saved == []
    assert torch.equal(torch.get_rng_state(), state)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Attending()

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


def test_recomputation_takes_the_way_of_its_forward(measuring, monkeypatch, slow):
    slow(PRODUCTS)
    slow(BLOCKS)
    taken = []
    monkeypatch.setattr(kernel, "MIN_SCORES", 1)
    monkeypatch.setattr(kernel.blocked_attention, "supports", lambda *_: True)
    way = kernel._algorithm
    monkeypatch.setattr(kernel, "_algorithm", lambda call: taken.append(way(call)) or taken[-1])
    torch.manual_seed(0)
    model = Checkpointed()
    optimizer, tokens = torch.optim.SGD(model.parameters(), 0.1), torch.randint(20, (4, 16))
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)

    @nano(precision="bf16", verbose=False)
    def train(model, optimizer):
        other.step()
        for _ in range(2):
            before = model(tokens).square().mean()
            other.step()  # after the second step there is time for a measurement
            model(tokens).square().mean().backward()
            before.backward()
            optimizer.step()

    train(model, optimizer)
    assert len(taken) == 2 * 2 * 2  # each is computed twice
    assert set(taken) == {BLOCKS, TORCH}  # the guess first, and then the fastest
