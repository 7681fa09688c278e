"""Sets the number of compute threads to the option's value, or to the number of physical cores of this process.

torch counts the machine's cores and ignores cgroup quotas. In a container that may use 2 of 64 CPUs, its 64 threads
wait for each other most of the time (xgboost#7653 measured 28 s instead of 0.3 s).

With ``num_threads="auto"``, steps of the loop show whether one thread is faster than several; by default only if other
programs use the CPUs in the first steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from typing_extensions import override

from nano_loop.config.environment import is_exported
from nano_loop.cpu.process import Waits, is_busy
from nano_loop.patching.patch_table import shared_change, users
from nano_loop.runtime.objects.report import StepResult, duration
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.trial import StepTrial
from nano_loop.steps.step import SkipReason, Step

_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_USERS_OWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_RAYS = "RAY_RAYLET_PID"  # set in actors and tasks: only Ray knows the other load of the node
#: Minimum seconds of a run for which CPU waits are reported.
_LONG = 10.0
#: The optimizer step after which the waits decide whether one thread is tried.
_FIRST_STEPS = 20


class Threads(Step):
    """Sets torch's thread count to ``num_threads``, or lowers it to the cores that affinity, cpuset and quota allow."""

    name = "threads"
    needs = None
    once = True
    enabled = True

    @override
    def begin(self) -> None:
        self._waits: Waits | None = None
        self._began = 0.0
        self._trial: StepTrial[int] | None = None

    @override
    def observe(self, parts: TrainingObjects) -> None:
        if self._waits is None:  # in the first setup
            self._began, self._waits = time.monotonic(), Waits()

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if self._number_asked_for is not None:
            return None
        count, wanted = torch.get_num_threads(), self.machine.num_threads
        for variable in _USERS_OWN:
            if variable in os.environ and _is_users(variable):
                return SkipReason("users_setting", f"{variable}={os.environ[variable]} is set, and is kept")
        for variable in _BINDING:
            if os.environ.get(variable, "false").lower() != "false" and count > wanted and not self.ranks.shares:
                # OpenMP has bound this thread to one CPU, and binds the others to other CPUs.
                return SkipReason("bound_by_openmp", f"{variable} binds torch's {count} threads, which are kept")
        if count < wanted and (_RAYS in os.environ or _is_users(_USERS_OWN[0])):
            return SkipReason("users_number", f"torch was set to {count}, fewer than the {wanted} physical cores")
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self.options.num_threads is None:
            self.undoing.callback(self.clock.in_steps(_FIRST_STEPS, self._try_one))
        wanted_by_user, count = self._number_asked_for, torch.get_num_threads()
        wanted = wanted_by_user or self.machine.num_threads
        words = f"{wanted}, " + ("as requested" if wanted_by_user else "one per physical core")
        key = "threads", threading.get_ident(), wanted
        if count == wanted and not users(key):
            return words
        # A run that is measuring may have another number now, and restores it itself.
        is_shared = count == wanted or not users(key) or self.options.num_threads == "auto"
        changed = shared_change(key, lambda: set_threads(wanted)) if is_shared else set_threads(wanted)
        self.undoing.enter_context(changed)
        return words if count == wanted else f"{words} (torch had {count})"

    @property
    def _number_asked_for(self) -> int | None:
        number = self.options.num_threads
        return number if isinstance(number, int) else None

    def _try_one(self) -> None:
        """Begin a trial of one thread if other programs use the CPUs."""
        is_wanted = self.clock.is_here and self._waits is not None and is_busy(self._waits.share())
        if is_wanted and _reason_to_keep(self) is None:
            self._trial = _begin_trial(self)

    @override
    def final_result(self) -> StepResult | None:
        if self._trial is not None and self._trial.medians:
            detail = f"other programs used the CPUs; threads: {_outcome(self._trial)}"
            return StepResult("cpu_waits", "measured", detail)
        if self._waits is None or time.monotonic() - self._began < _LONG:
            return None
        share = self._waits.share()
        if not is_busy(share):
            return None
        detail = f"other programs used the CPUs: threads spent {share:.0%} of their runnable time waiting"
        return StepResult("cpu_waits", "measured", f"{detail}{_advice(torch.get_num_threads())}")


@contextmanager
def set_threads(number: int) -> Iterator[None]:
    """Set the number of compute threads of this thread. Runs share it, and may end in any order."""
    before, thread = torch.get_num_threads(), threading.get_ident()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        if threading.get_ident() == thread:  # a garbage collection may end a run in another thread
            torch.set_num_threads(before)


def _advice(threads: int) -> str:
    is_passive = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
    other = "" if is_passive else " or OMP_WAIT_POLICY=passive"
    return f"; num_threads={threads - 1}{other} may be faster" if threads > 1 else ""


def _is_users(variable: str) -> bool:
    """Whether the user chose the thread count, and not torchrun, Ray or `nano-loop env`.

    With several processes, torchrun sets it to 1. Ray sets it to the CPUs of an actor or a task, which may be hardware
    threads, or to 1. `nano-loop env` sets it to the cores of the whole host.
    """
    if variable == "OMP_NUM_THREADS" and _RAYS in os.environ:
        return False
    torchruns = "TORCHELASTIC_RUN_ID" in os.environ and (variable, os.environ.get(variable)) == ("OMP_NUM_THREADS", "1")
    return not torchruns and not is_exported(variable, os.environ)


_DETERMINISTIC = "torch.use_deterministic_algorithms is on"


class NumThreads(Step):
    """Alternates steps of an optimizer between one thread and several."""

    name = "num_threads"
    needs = "optimizers"

    @property
    @override
    def enabled(self) -> bool:
        return self.options.num_threads == "auto"

    @override
    def begin(self) -> None:
        self._trial: StepTrial[int] | None = None

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        return _reason_to_keep(self, is_measuring=self._trial is not None)

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self._trial is None:
            self._trial = _begin_trial(self)
        return f"1 or {max(self._trial.settings)}, measured in the first steps"

    @override
    def final_result(self) -> StepResult | None:
        """Return the chosen number of threads, and the step times with each."""
        trial = self._trial
        if trial is None:
            return None
        if torch.are_deterministic_algorithms_enabled():
            return StepResult(self.name, "measured", f"{trial.setting}: {_DETERMINISTIC}", code="deterministic")
        if not trial.medians:
            return StepResult(self.name, "measured", f"{trial.setting}: too few steps to tell", code="too_few_steps")
        code = "one_thread_is_faster" if trial.setting == 1 else "more_threads_stay"
        return StepResult(self.name, "measured", _outcome(trial), code=code)


def _reason_to_keep(step: Step, is_measuring: bool = False) -> SkipReason | None:
    """Return why the number of threads must not change between the steps of a run, or None."""
    if step.options.exact:
        return SkipReason("exact", "sums with another number of threads differ in bits, and exact is on")
    if torch.are_deterministic_algorithms_enabled():
        return SkipReason("deterministic", _DETERMINISTIC)
    if step.ranks.size > 1:
        # What each rank computes from all gradients, such as their norm, would differ in bits between ranks.
        return SkipReason("several_processes", "all ranks use one number, so that they compute the same")
    if step.options.compile:
        return SkipReason("compiled", "compiled code keeps its number of threads")
    if not is_measuring and users(_key()):
        return SkipReason("other_run", "another run in this thread is measuring")
    if not is_measuring and torch.get_num_threads() == 1:
        return SkipReason("one_thread", "only one thread is available")
    return None


def _begin_trial(step: Step) -> StepTrial[int]:
    """Alternate steps between the present number of threads and one, until the step is undone."""
    settings = torch.get_num_threads(), 1
    step.undoing.enter_context(shared_change(_key(), lambda: set_threads(settings[0])))
    take, longer = torch.set_num_threads, max(settings) - 1
    trial = StepTrial(
        NumThreads.name, settings, take, step.budget, step.machine, longer=longer, present=torch.get_num_threads
    )
    step.undoing.callback(trial.end)
    step.undoing.callback(step.clock.after(trial.note))
    return trial


def _outcome(trial: StepTrial[int]) -> str:
    """Return the chosen number of threads, and the times of steps by number."""
    times = ", ".join(f"{duration(time)} per step with {number}" for number, time in trial.medians.items())
    often = f"{f', measured {trial.measured} times' if trial.measured > 1 else ''}{trial.unsure}"
    return f"{trial.setting}: {times}{often}"


def _key() -> tuple[str, int]:
    return "num_threads", threading.get_ident()
