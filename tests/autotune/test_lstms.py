"""Layers of LSTMs are computed in the way that is the fastest for their shape, if it is as exact as oneDNN's."""

import time

import pytest
import torch
from torch import nn

from autotune.time_for import ALWAYS, TimeFor
from nano_loop import nano
from nano_loop.autotune import lstms
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.lstms import chooser
from nano_loop.autotune.tuner import Tuner
from nano_loop.kernels.rnn import lstm as kernel
from nano_loop.kernels.rnn import lstm_layer
from nano_loop.kernels.rnn.lstm import BLOCKS, TORCH
from nano_loop.kernels.rnn.lstm_layer import Arguments
from nano_loop.patching.operators.operators import gives_kernels

pytestmark = [
    pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9"),
    pytest.mark.skipif(lstm_layer.KERNEL.unavailable is not None, reason=str(lstm_layer.KERNEL.unavailable)),
]


def given(steps=20, batch=5, size=6, has_biases=True):
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return (torch.randn(sizes, generator=generator) / 4).bfloat16()

    biases = (normal(64), normal(64)) if has_biases else ()
    return Arguments(
        normal(steps, batch, size),
        normal(64, size),
        normal(64, 16),
        biases,
        normal(batch, 16),
        normal(batch, 16),
        False,
    )


def by_torch(tensors):
    has_biases = tensors[3].dim() == 1
    return torch.ops.aten.mkldnn_rnn_layer(*tensors, False, [], 2, 16, 1, has_biases, False, False, True)[:3]


@pytest.fixture
def slow(monkeypatch):
    """Let a way take 60 milliseconds longer, or ours compute something else. Returns the numbers of steps of ours."""
    original, steps = lstm_layer.lstm, []

    def change(way, factor=1.0):
        def ours(given):
            steps.append(given.inputs.size(0))
            time.sleep(0.06 * (way == BLOCKS))
            outputs, *state = original(given)
            return outputs * factor, *state

        def torchs(tensors):
            time.sleep(0.06 * (way == TORCH))
            return by_torch(tensors)

        monkeypatch.setattr(lstms, "lstm", ours)
        return torchs

    change.steps = steps
    return change


@pytest.mark.parametrize(("other", "fast"), [(TORCH, BLOCKS), (BLOCKS, TORCH)])
@pytest.mark.parametrize("guess", [TORCH, BLOCKS])
@pytest.mark.parametrize("has_biases", [True, False])
def test_the_fastest_way_is_kept(slow, other, fast, guess, has_biases):
    tuner, torchs = Tuner(Choices(None), ALWAYS), slow(other)
    choose = chooser(tuner)
    assert {choose(torchs, given(has_biases=has_biases), guess) for _ in range(3)} == {fast}
    assert tuner.measured == 1
    assert chooser(Tuner(tuner.choices, TimeFor(0.0)))(torchs, given(has_biases=has_biases), guess) == fast  # later
    assert set(slow.steps) == {20}


def test_a_wrong_way_is_rejected(slow):
    assert chooser(Tuner(Choices(None), ALWAYS))(slow(TORCH, factor=1.05), given(), BLOCKS) == TORCH


def test_some_steps_of_a_large_layer_and_none_of_a_very_large_one_are_timed(slow, monkeypatch):
    monkeypatch.setattr(lstms, "_ENOUGH", 1)
    tuner, torchs = Tuner(Choices(None), ALWAYS), slow(TORCH)
    assert chooser(tuner)(torchs, given(), TORCH) == BLOCKS
    assert set(slow.steps) == {lstms._SOME_STEPS}  # of 20
    monkeypatch.setattr(lstms, "MOST_ELEMENTS", 1)
    assert chooser(tuner)(torchs, given(size=8), TORCH) == TORCH
    assert tuner.measured == 1


def test_shapes_are_measured_apart_and_lengths_and_batches_roughly_together(slow):
    tuner, torchs = Tuner(Choices(None), ALWAYS), slow(TORCH)
    choose = chooser(tuner)
    for call in (given(), given(steps=21), given(batch=6), given(size=8), given(has_biases=False)):
        choose(torchs, call, TORCH)
    assert tuner.measured == 3
    choose(torchs, given(batch=9), TORCH)
    choose(torchs, given()._replace(is_reversed=True), TORCH)
    assert tuner.measured == 5


def test_a_run_measures_its_layers_without_changing_the_loops_random_numbers(monkeypatch):
    monkeypatch.setattr(kernel, "MIN_MULTIPLICATIONS", 1)
    calls, original = [], lstms._ways
    monkeypatch.setattr(lstms, "_ways", lambda *args: calls.append(args[1]) or original(*args))
    monkeypatch.setattr("nano_loop.autotune.budget.STEPS", 1e6)

    def loop(model, optimizer):
        torch.manual_seed(1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(20, 5, 24))[0].square().sum().backward()
            optimizer.step()
        return torch.rand(1)

    def drawn(**options):
        torch.manual_seed(0)
        model = nn.LSTM(24, 16)
        train = nano(precision="bf16", verbose=False, **options)(loop)
        return train(model, torch.optim.SGD(model.parameters(), 0.01))

    assert torch.equal(drawn(), drawn(tune_operators=False, fast_lstm=False))
    assert len(calls) == 1
