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
#: The name of the trial, and of its line in the report.
_TRIED = "num_threads"
_DETERMINISTIC = "torch.use_deterministic_algorithms is on"


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
        self._kept_because: SkipReason | None = None  # why there was no trial

    @override
    def observe(self, parts: TrainingObjects) -> None:
        if self._waits is None:  # in the first setup
            self._began, self._waits = time.monotonic(), Waits()
            if self._is_auto:
                self.undoing.callback(self.clock.in_steps(1, self._try_one))

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if isinstance(self.options.num_threads, int):
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
        number, count = self.options.num_threads, torch.get_num_threads()
        wanted = number if isinstance(number, int) else self.machine.num_threads
        words = f"{wanted}, " + ("as requested" if isinstance(number, int) else "one per physical core")
        key = "threads", threading.get_ident(), wanted
        if count == wanted and not users(key):
            return words
        # A run that is measuring may have another number now, and restores it itself.
        is_shared = count == wanted or not users(key) or self.options.num_threads == "auto"
        changed = shared_change(key, lambda: set_threads(wanted)) if is_shared else set_threads(wanted)
        self.undoing.enter_context(changed)
        return words if count == wanted else f"{words} (torch had {count})"

    @property
    def _is_auto(self) -> bool:
        return self.options.num_threads == "auto"

    def _try_one(self) -> None:
        """Begin a trial of one thread if that is requested or other programs use the CPUs."""
        is_wanted = self._is_auto or (self._waits is not None and is_busy(self._waits.share()))
        key = _TRIED, threading.get_ident()
        self._kept_because = self._reason_to_keep(key)
        if not is_wanted or self._kept_because is not None or not self.clock.is_here:
            return
        settings = torch.get_num_threads(), 1
        self.undoing.enter_context(shared_change(key, lambda: set_threads(settings[0])))
        take, longer = torch.set_num_threads, max(settings) - 1
        self._trial = StepTrial(
            _TRIED, settings, take, self.budget, self.machine, longer=longer, present=torch.get_num_threads
        )
        self.undoing.callback(self._trial.end)
        self.undoing.callback(self.clock.after(self._trial.note))

    def _reason_to_keep(self, key: tuple[str, int]) -> SkipReason | None:
        """Return why the number of threads must not change between the steps of a run, or None."""
        if self.options.exact:
            return SkipReason("exact", "sums with another number of threads differ in bits, and exact is on")
        if torch.are_deterministic_algorithms_enabled():
            return SkipReason("deterministic", _DETERMINISTIC)
        if self.ranks.size > 1:
            # What each rank computes from all gradients, such as their norm, would differ in bits between ranks.
            return SkipReason("several_processes", "all ranks use one number, so that they compute the same")
        if self.options.compile:
            return SkipReason("compiled", "compiled code keeps its number of threads")
        if users(key):
            return SkipReason("other_run", "another run in this thread is measuring")
        if torch.get_num_threads() == 1:
            return SkipReason("one_thread", "only one thread is available")
        return None

    @override
    def final_result(self) -> StepResult | None:
        """Return how long threads waited for other programs, or with "auto" the chosen number or why it was kept."""
        waits, trial = self._waited(), self._trial
        outcome = self._kept_because if trial is None else _outcome(trial)
        if self._is_auto and outcome is not None:
            detail = f"{outcome.detail}; {waits}" if waits else outcome.detail
            return StepResult(_TRIED, "skipped" if trial is None else "measured", detail, code=outcome.code)
        if trial is not None and trial.medians:
            waits = f"other programs used the CPUs; threads: {_outcome(trial).detail}"
        return StepResult("cpu_waits", "measured", waits) if waits else None

    def _waited(self) -> str:
        """Return the report line of a long run if other programs used the CPUs; otherwise an empty string."""
        share = None if self._waits is None or time.monotonic() - self._began < _LONG else self._waits.share()
        if not is_busy(share):
            return ""
        detail = f"other programs used the CPUs: threads spent {share:.0%} of their runnable time waiting"
        return detail if self._is_auto else f"{detail}{_advice(torch.get_num_threads())}"


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
    """Whether the user chose the thread count, and not torchrun (1), Ray (an actor's CPUs) or `nano-loop env`."""
    if variable == "OMP_NUM_THREADS" and _RAYS in os.environ:
        return False
    torchruns = "TORCHELASTIC_RUN_ID" in os.environ and (variable, os.environ.get(variable)) == ("OMP_NUM_THREADS", "1")
    return not torchruns and not is_exported(variable, os.environ)


def _outcome(trial: StepTrial[int]) -> SkipReason:
    """Return the code and the report line of a trial: the chosen number of threads, and times of steps by number."""
    if torch.are_deterministic_algorithms_enabled():
        return SkipReason("deterministic", f"{trial.setting}: {_DETERMINISTIC}")
    if not trial.medians:
        return SkipReason("too_few_steps", f"{trial.setting}: too few steps to tell")
    times = ", ".join(f"{duration(time)} per step with {number}" for number, time in trial.medians.items())
    often = f"{f', measured {trial.measured} times' if trial.measured > 1 else ''}{trial.unsure}"
    code = "one_thread_is_faster" if trial.setting == 1 else "more_threads_stay"
    return SkipReason(code, f"{trial.setting}: {times}{often}")
