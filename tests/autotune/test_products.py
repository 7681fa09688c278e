"""Products are computed in the way that is the fastest for their shape, if it is as exact as torch's."""

import time

import pytest
import torch
from torch import nn

from autotune.time_for import ALWAYS, TimeFor
from nano_loop import nano
from nano_loop.autotune import products
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.products import chooser
from nano_loop.autotune.tuner import Tuner
from nano_loop.kernels.linear import linear, product
from nano_loop.kernels.linear.linear import BLOCKS, TORCH, Arguments
from nano_loop.patching.operators.operators import gives_kernels


def given(rows=40, bias=False, transposed=False):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(*((48, rows) if transposed else (rows, 48)), generator=generator).bfloat16()
    b = torch.randn(48, 56, generator=generator).bfloat16()
    return Arguments(a.t() if transposed else a, b, torch.ones(56).bfloat16() if bias else None)


def by_way(slow, factor=1.0, calls=None):
    """Compute by any way, where one takes 60 milliseconds, and blocks are off by a factor."""

    def compute(way, given):
        if calls is not None:
            calls.append(given)
        if way == slow:
            time.sleep(0.06)
        return given.a @ given.b * (factor if way == BLOCKS else 1.0)

    return compute


@pytest.mark.parametrize(("slow", "fast"), [(TORCH, BLOCKS), (BLOCKS, TORCH)])
@pytest.mark.parametrize("guess", [TORCH, BLOCKS])
def test_the_fastest_way_is_kept(slow, fast, guess):
    tuner = Tuner(Choices(None), ALWAYS)
    choose = chooser(tuner)
    assert {choose(by_way(slow), given(), guess) for _ in range(3)} == {fast}
    assert tuner.measured == 1
    assert chooser(Tuner(tuner.choices, TimeFor(0.0)))(by_way(slow), given(), guess) == fast  # as a later run


def test_a_wrong_way_is_rejected():
    assert chooser(Tuner(Choices(None), ALWAYS))(by_way(TORCH, factor=1.05), given(), BLOCKS) == TORCH


def test_without_time_the_guess_is_taken_until_the_next_turn():
    budget = TimeFor(0.0)
    choose = chooser(Tuner(Choices(None), budget))
    assert choose(by_way(TORCH), given(), TORCH) == TORCH
    asked = len(budget.asked)
    assert choose(by_way(TORCH), given(), TORCH) == TORCH
    assert len(budget.asked) == asked
    budget.seconds, budget.turn = float("inf"), 1
    assert choose(by_way(TORCH), given(), TORCH) == BLOCKS


def test_orders_and_biases_are_measured_apart_and_batches_together():
    tuner = Tuner(Choices(None), ALWAYS)
    choose = chooser(tuner)
    for call in (given(33), given(40), given(64), given(65), given(40, bias=True), given(40, transposed=True)):
        choose(by_way(TORCH), call, TORCH)
    assert tuner.measured == 4


def test_of_a_large_result_some_rows_are_measured(monkeypatch):
    monkeypatch.setattr(products, "MOST_ELEMENTS", 56 * 10)
    monkeypatch.setattr(products, "_FEWEST_ROWS", 1)
    calls = []
    chooser(Tuner(Choices(None), ALWAYS))(by_way(TORCH, calls=calls), given(), TORCH)
    assert {each.a.shape for each in calls} == {(10, 48)}


@pytest.mark.skipif(
    not gives_kernels() or product.KERNEL.unavailable is not None,
    reason=product.KERNEL.unavailable or "it needs torch 2.9",
)
def test_layers_and_their_gradients_are_measured_in_a_run(monkeypatch):
    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", 1)
    tuner = Tuner(Choices(None), ALWAYS)
    monkeypatch.setattr("nano_loop.steps.tune_operators.Tuner", lambda *_: tuner)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 40, bias=False))

    def loop(model, optimizer):
        for _ in range(4):
            model(torch.ones(50, 64)).float().sum().backward()
            optimizer.step()

    nano(precision="bf16", verbose=False, fast_linear=True)(loop)(model, torch.optim.SGD(model.parameters(), 0.1))
    measured = {key for key in tuner.choices.all() if key.startswith("product")}
    assert measured == {
        "product 2^6 by 64 by 48 NT plus a row",
        "product 2^6 by 48 by 40 NT",
        "product 2^6 by 40 by 48 NN",
        "product 40 by 2^6 by 48 TN",
        "product 48 by 2^6 by 64 TN",
    }
