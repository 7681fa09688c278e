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


@pytest.mark.parametrize(("cores", "quota", "threads"), [(3, None, 3), (4, 2.5, 2)])
def test_count_is_lowered_to_the_cores_or_the_quota_and_put_back(step, machine, cores, quota, threads):
    made = step(Threads, on=machine(cores=cores, quota=quota))
    assert made.skip_reason(TrainingObjects()) is None
    assert "torch had 4" in made.apply(TrainingObjects())
    assert torch.get_num_threads() == threads
    made.undo()
    assert torch.get_num_threads() == 4


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


BY_COMMAND = {EXPORTS: Exports({"OMP_NUM_THREADS": None}, {"OMP_NUM_THREADS": "4"}).encoded()}


@pytest.mark.parametrize(
    ("variables", "before", "cores", "code"),
    [
        ({}, 4, 8, "users_number"),
        ({"OMP_NUM_THREADS": "4"}, 4, 2, "users_setting"),
        ({"MKL_NUM_THREADS": "4"}, 4, 2, "users_setting"),
        ({"OMP_NUM_THREADS": "4", **BY_COMMAND}, 4, 2, None),
        ({"OMP_NUM_THREADS": "3", **BY_COMMAND}, 4, 2, "users_setting"),  # set by the user later
        # Ray counts CPUs, which may be hardware threads: its number is a limit.
        *(
            ({"RAY_RAYLET_PID": "1", "OMP_NUM_THREADS": str(count)}, count, cores, code)
            for count, cores, code in ((1, 8, "users_number"), (3, 8, "users_number"), (8, 8, None), (8, 4, None))
        ),
    ],
)
def test_number_of_the_user_stays_unless_it_is_ours_or_the_option_asks_for_another(
    step, machine, monkeypatch, variables, before, cores, code
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(before)
    made = step(Threads, on=machine(cores=cores))
    reason = made.skip_reason(TrainingObjects())
    assert (reason and reason.code) == code
    if reason is None:
        made.apply(TrainingObjects())
        assert torch.get_num_threads() == min(before, cores)
        made.undo()
    elif code == "users_setting":
        assert any(f"{name}={value}" in reason.detail for name, value in variables.items())
    asked = step(Threads, on=machine(cores=cores), num_threads=2)
    assert asked.skip_reason(TrainingObjects()) is None
    assert asked.apply(TrainingObjects()) == f"2, as requested (torch had {before})"
    assert torch.get_num_threads() == 2
    asked.undo()
    assert torch.get_num_threads() == before


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
