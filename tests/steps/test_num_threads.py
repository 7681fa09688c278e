"""num_threads="auto" is constant if results must be equal, is reported, and is undone."""

from types import SimpleNamespace

import pytest
import torch
from watched import fit, make

from nano_loop import nano
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.trial import StepTrial
from nano_loop.steps import threads as threads_module
from nano_loop.steps.threads import Threads


@pytest.fixture(autouse=True)
def two_threads(set_num_threads):
    set_num_threads(2)


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
    train(*make())
    found = [(result.status, result.code) for result in train.report.results if result.name == "num_threads"]
    code = {0.001: "one_thread_is_faster", 0.002: "more_threads_stay", None: "too_few_steps"}[medians.get(1)]
    assert found == [("measured", code)]
    assert torch.get_num_threads() == 2


def tried(step, **settings):
    """Return a step that has been applied if it applies, after a step of an optimizer, and its last line."""
    made, objects = step(Threads, num_threads="auto", **settings), TrainingObjects([], [make()[1]])
    made.observe(objects)
    if made.skip_reason(objects) is None:
        made.apply(objects)
    made.clock.add(objects.optimizers)
    assert made._trial is made._kept_because is None, "nothing is known before the first step"
    objects.optimizers[0].step()
    return made, made.final_result()


@pytest.mark.parametrize(
    ("options", "ranks", "code"),
    [
        ({"exact": True}, 1, "exact"),
        ({"compile": True}, 1, "compiled"),
        ({}, 2, "several_processes"),
        ({}, 1, "too_few_steps"),
    ],
)
def test_where_the_number_is_fixed_the_reason_is_said(step, machine, options, ranks, code):
    made, line = tried(step, on=machine(cores=2), ranks=Ranks(0, ranks), **options)
    assert (line.name, line.code) == ("num_threads", code)
    assert (made._trial is not None) == (code == "too_few_steps")


def test_deterministic_algorithms_and_one_thread_leave_nothing_to_measure(step, machine, deterministic):
    assert tried(step, on=machine(cores=1))[1].code == "one_thread"
    deterministic()
    assert tried(step, on=machine(cores=2))[1].code == "deterministic"


def test_number_that_the_environment_has_set_is_kept_and_tried(step, machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    made, line = tried(step, on=machine(cores=4))
    assert made.skip_reason(TrainingObjects()).code == "users_setting"
    assert made._trial.settings == (2, 1)
    assert line.detail == "2: too few steps to tell"


def test_line_says_too_that_other_programs_had_the_cpus(step, machine, monkeypatch):
    monkeypatch.setattr(threads_module, "Waits", lambda: SimpleNamespace(share=lambda: 0.46))
    monkeypatch.setattr(threads_module, "_LONG", 0.0)
    made, _ = tried(step, on=machine(cores=2))
    made._trial.medians = {2: 0.001, 1: 0.002}
    line = made.final_result()
    times = "2: 1.00 ms per step with 2, 2.00 ms per step with 1"
    assert line.detail == f"{times}; other programs used the CPUs: threads spent 46% of their runnable time waiting"


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_runs_that_overlap_put_the_number_back_in_any_order(step, machine, first_ends_first):
    """As in the ambient mode, the second run begins after the first has settled on one thread."""
    torch.set_num_threads(4)
    first, line = tried(step, on=machine(cores=2))
    assert (line.code, torch.get_num_threads()) == ("too_few_steps", 2)
    torch.set_num_threads(1)  # as the trial does
    second, line = tried(step, on=machine(cores=2))
    assert (line.code, torch.get_num_threads()) == ("other_run", 1)
    for made in (first, second) if first_ends_first else (second, first):
        made.undo()
    assert torch.get_num_threads() == 4
