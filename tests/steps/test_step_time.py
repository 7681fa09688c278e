"""On request, the report's second-last line has the time of a step; otherwise nothing is timed."""

import re
import time

import pytest
import torch
from torch import nn

from nano_loop import nano
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step_time import StepTime


def parts():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fit(model, optimizer, steps, seconds=0.0):
    for _ in range(steps):
        time.sleep(seconds)
        optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    return len(optimizer._optimizer_step_post_hooks)


def test_line_before_the_memory_is_the_time_of_a_step(capsys):
    train = nano(step_time=True)(fit)
    optimizer = parts()[1]
    train(*parts(), steps=12, seconds=0.02)
    last = capsys.readouterr().err.splitlines()[-2]
    found = re.fullmatch(r"  measured  step_time +([\d.]+) ms per step \(median\)", last)
    assert float(found[1]) >= 20
    assert str(train.report).splitlines()[-2] == last
    train(*parts(), steps=12)
    assert capsys.readouterr().err == "", "printed once, like the rest of the report"
    assert not optimizer._optimizer_step_post_hooks


def test_without_it_there_is_no_line_and_with_it_no_hook_more():
    train, timed = (nano(step_time=each, verbose=False)(fit) for each in (False, True))
    assert timed(*parts(), 6) == train(*parts(), 6) == 1
    assert timed.report["step_time"].detail == "too few steps to tell"
    assert "step_time" not in str(train.report)
    assert fit(*parts(), 6) == 0


def made():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


@pytest.fixture
def take(monkeypatch):
    """Take optimizer steps that last some seconds on a fake clock; nothing else takes time."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def take(optimizer, *seconds):
        for each in seconds:
            now[0] += each
            optimizer.step()

    return take


def test_median_leaves_the_first_steps_and_those_of_other_optimizers_out(step, take):
    optimizer, other = made(), made()
    timed = step(StepTime, step_time=True)
    timed.apply(TrainingObjects([], [optimizer]))
    timed.apply(TrainingObjects([], [other]))
    take(other, 70)
    take(optimizer, 50, 50, 50, 50, 0.003, 0.002, 0.004, 0.003, 9)
    assert timed.final_result().detail == "3.00 ms per step (median)"
    take(other, 70)
    assert timed.final_result().detail == "3.00 ms per step (median)"
    assert (timed.clock.began, timed.clock.shortest) == (70, pytest.approx(0.002))


def test_of_a_long_run_the_last_steps_count(step, take):
    optimizer = made()
    timed = step(StepTime, step_time=True)
    timed.apply(TrainingObjects([], [optimizer]))
    take(optimizer, *[1] * 1500, *[2] * 900)
    assert timed.final_result().detail == "2.00 s per step (median)"
