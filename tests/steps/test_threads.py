"""torch uses as many threads as the process has physical cores."""

from types import SimpleNamespace

import pytest
import torch

from nano_loop.config.environment import EXPORTS, Exports
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps import threads as threads_module
from nano_loop.steps.threads import Threads


@pytest.fixture(autouse=True)
def four_threads(set_num_threads):
    set_num_threads(4)


def test_count_is_lowered_to_the_cores_and_put_back(step, machine):
    made = step(Threads, on=machine(cores=3))
    assert made.skip_reason(TrainingObjects()) is None
    assert "torch had 4" in made.apply(TrainingObjects())
    assert torch.get_num_threads() == 3
    made.undo()
    assert torch.get_num_threads() == 4


def test_count_is_lowered_to_the_quota(step, machine):
    step(Threads, on=machine(cores=4, quota=2.5)).apply(TrainingObjects())
    assert torch.get_num_threads() == 2


def test_fewer_threads_that_the_user_set_stay(step, machine):
    assert step(Threads, on=machine(cores=8)).skip_reason(TrainingObjects()).code == "users_number"


BINDINGS = [("OMP_PROC_BIND", "close"), ("OMP_PROC_BIND", "TRUE"), ("GOMP_CPU_AFFINITY", "0-1")]


@pytest.mark.parametrize(("variable", "value"), BINDINGS)
def test_threads_that_openmp_has_bound_stay_in_one_process(step, machine, monkeypatch, variable, value):
    """The loop's thread is bound to one CPU then, and the other threads to theirs."""
    monkeypatch.setenv(variable, value)
    assert step(Threads, on=machine(cores=1)).skip_reason(TrainingObjects()).code == "bound_by_openmp"
    in_share = step(Threads, on=machine(cores=1), ranks=Ranks(0, 2, shares=((0,), (1,))))
    assert in_share.skip_reason(TrainingObjects()) is None
    monkeypatch.setenv(variable, "false")
    assert step(Threads, on=machine(cores=1)).skip_reason(TrainingObjects()) is None


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_users_environment_stays_in_force(step, machine, monkeypatch, variable):
    monkeypatch.setenv(variable, "4")
    reason = step(Threads, on=machine(cores=2)).skip_reason(TrainingObjects())
    assert reason.code == "users_setting"
    assert f"{variable}=4" in reason.detail


def test_count_that_the_command_line_has_exported_is_lowered_to_a_ranks_share(step, machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv(EXPORTS, Exports({"OMP_NUM_THREADS": None}, {"OMP_NUM_THREADS": "4"}).encoded())
    made = step(Threads, on=machine(cores=2))
    assert made.skip_reason(TrainingObjects()) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # set by the user later
    assert made.skip_reason(TrainingObjects()).code == "users_setting"


@pytest.mark.parametrize(
    ("count", "cores", "code"), [(1, 8, "users_number"), (3, 8, "users_number"), (8, 8, None), (8, 4, None)]
)
def test_number_that_ray_has_set_for_an_actor_is_a_limit(step, machine, monkeypatch, count, cores, code):
    """Ray counts CPUs, which may be hardware threads."""
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", str(count))
    torch.set_num_threads(count)
    made = step(Threads, on=machine(cores=cores))
    reason = made.skip_reason(TrainingObjects())
    assert (reason and reason.code) == code
    if reason is None:
        made.apply(TrainingObjects())
    assert torch.get_num_threads() == min(count, cores)


def test_number_that_the_option_asks_for_is_set_above_all_others(step, machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    made = step(Threads, on=machine(cores=2), num_threads=3)
    assert made.skip_reason(TrainingObjects()) is None
    assert made.apply(TrainingObjects()) == "3, as requested (torch had 4)"
    assert torch.get_num_threads() == 3
    made.undo()
    assert torch.get_num_threads() == 4


WAITED = "other programs used the CPUs: threads spent 46% of their runnable time waiting"


@pytest.mark.parametrize(
    ("share", "seconds", "threads", "words"),
    [
        (0.46, 60, 4, f"{WAITED}; num_threads=3 or OMP_WAIT_POLICY=passive may be faster"),
        (0.46, 60, 1, WAITED),
        (0.1, 60, 4, None),
        (0.46, 3, 4, None),
        (None, 60, 4, None),
    ],
    ids=["busy", "one thread", "a little", "short", "not counted"],
)
def test_report_says_when_other_programs_had_the_cpus(step, monkeypatch, share, seconds, threads, words):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    clock = iter([0.0, float(seconds)])
    monkeypatch.setattr(threads_module, "Waits", lambda: SimpleNamespace(share=lambda: share))
    monkeypatch.setattr(threads_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    torch.set_num_threads(threads)
    made = step(Threads)
    made.observe(TrainingObjects())
    found = made.final_result()
    if words is None:
        assert found is None
    else:
        assert (found.name, found.status) == ("cpu_waits", "measured")
        assert found.detail == words
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        monkeypatch.setattr(threads_module, "time", SimpleNamespace(monotonic=lambda: 60.0))
        assert "OMP_WAIT_POLICY" not in made.final_result().detail


@pytest.mark.parametrize(
    ("share", "options", "ranks", "is_tried"),
    [
        (0.46, {}, 1, True),
        (0.1, {}, 1, False),
        (None, {}, 1, False),
        (0.46, {"num_threads": 2}, 1, False),
        (0.46, {"exact": True}, 1, False),
        (0.46, {}, 2, False),
    ],
    ids=["busy", "quiet", "not counted", "a number is given", "exact", "several processes"],
)
def test_one_thread_is_tried_where_other_programs_use_the_cpus(
    step, machine, monkeypatch, share, options, ranks, is_tried
):
    monkeypatch.setattr(threads_module, "Waits", lambda: SimpleNamespace(share=lambda: share))
    made = step(Threads, on=machine(cores=4), ranks=Ranks(0, ranks), **options)
    made.observe(TrainingObjects())
    made.apply(TrainingObjects())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    made.clock.add([optimizer])
    for number in range(20):
        assert made._trial is None, number
        optimizer.step()
    assert (made._trial is not None) == is_tried
    if is_tried:
        made._trial.setting, made._trial.medians = 1, {4: 0.002, 1: 0.001}
        torch.set_num_threads(1)
        found = made.final_result()
        assert found.name == "cpu_waits"
        assert found.detail.startswith("other programs used the CPUs; threads: 1: 2.00 ms per step with 4")
    made.undo()
    assert torch.get_num_threads() == 4
