"""num_threads="auto" is constant if results must be equal, is reported, and is undone."""

import pytest
import torch
from torch import nn

from nano_loop import nano
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.trial import StepTrial
from nano_loop.steps.threads import NumThreads, Threads


@pytest.fixture(autouse=True)
def two_threads(set_num_threads):
    set_num_threads(2)


def parts():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def fit(model, optimizer, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()


OPTIONS = {"num_threads": "auto", "verbose": False}


@pytest.mark.parametrize("medians", [{}, {1: 0.001, 2: 0.002}, {1: 0.002, 2: 0.001}])
def test_report_says_what_was_measured_and_the_number_is_put_back(monkeypatch, medians):
    """The run ends with one thread."""

    def settled(trial, *_):
        trial.medians = medians
        trial.setting = min(medians, key=medians.get, default=trial.setting)
        torch.set_num_threads(trial.setting)

    monkeypatch.setattr(StepTrial, "note", settled)
    train = nano(**OPTIONS)(fit)
    train(*parts())
    found = [(result.status, result.code) for result in train.report.results if result.name == "num_threads"]
    code = {0.001: "one_thread_is_faster", 0.002: "more_threads_stay", None: "too_few_steps"}[medians.get(1)]
    assert found == [("applied", None), ("measured", code)]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("options", "ranks", "code"),
    [
        ({"exact": True}, 1, "exact"),
        ({"compile": True}, 1, "compiled"),
        ({}, 2, "several_processes"),
        ({}, 1, None),
    ],
)
def test_where_the_number_is_fixed_the_reason_is_said(step, options, ranks, code):
    made = step(NumThreads, ranks=Ranks(0, ranks), num_threads="auto", **options)
    reason = made.skip_reason(TrainingObjects([], [parts()[1]]))
    assert (reason and reason.code) == code


def test_deterministic_algorithms_and_one_thread_leave_nothing_to_measure(step):
    made = step(NumThreads, num_threads="auto")
    torch.set_num_threads(1)
    assert made.skip_reason(TrainingObjects()).code == "one_thread"
    torch.use_deterministic_algorithms(True)
    try:
        assert made.skip_reason(TrainingObjects()).code == "deterministic"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_runs_that_overlap_put_the_number_back_in_any_order(step, machine, first_ends_first):
    """As in the ambient mode, the second run begins after the first has settled on one thread."""
    torch.set_num_threads(4)
    runs = []
    for _ in range(2):
        made = [step(kind, on=machine(cores=2), num_threads="auto") for kind in (Threads, NumThreads)]
        made[0].apply(TrainingObjects())
        assert torch.get_num_threads() == (1 if runs else 2)
        if not runs:
            made[1].apply(TrainingObjects([], [parts()[1]]))
            torch.set_num_threads(1)  # as the trial does
        else:
            assert made[1].skip_reason(TrainingObjects()).code == "other_run"
        runs.append(made)
    for made in runs if first_ends_first else runs[::-1]:
        for each in made[::-1]:
            each.undo()
    assert torch.get_num_threads() == 4
