"""The life cycle of a run: it joins the ranks, applies the steps at each setup, undoes them, and fills the report.

Every public entry point (`nano_loop.TorchNano`, `nano_loop.nano`, `nano_loop.accelerated`) is a thin layer over `Run`.
"""

from __future__ import annotations

import atexit
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from nano_loop.config.protocol import take_command
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Loop, Ranks
from nano_loop.distributed.launch.active_runs import RunScope, forked_children_ending
from nano_loop.distributed.launch.join_run import joined
from nano_loop.distributed.launch.launcher import Alone, Launcher, Task
from nano_loop.errors import NanoConfigError, NanoError, NanoWorkerError, error_message
from nano_loop.kernels.build import compilation_announced
from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.patching.members import parameters_of
from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.user_code import trim_tracebacks
from nano_loop.runtime.clock import StepClock
from nano_loop.runtime.memory import MemoryWatch
from nano_loop.runtime.mkl_functions import resolve_mkl_functions
from nano_loop.runtime.objects.report import SetupReport, StepResult, print_lines
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.run_report import RunReport
from nano_loop.runtime.settings import Settings
from nano_loop.runtime.stepped_optimizers import SteppedOptimizers
from nano_loop.steps import STEPS, WITNESS_STEPS
from nano_loop.steps.gradient_averaging import GradientAveraging
from nano_loop.steps.step import Step, StepContext

#: The active runs, innermost last.
_active: dict[Run, None] = process_wide("runs", {})


def active_run() -> Run | None:
    """Return the active run that was started last; None outside a run."""
    return next(reversed(_active), None)


class RunTask(Task):
    """A task that is executed in a `Run` with its settings."""

    #: The steps of its run, in order.
    steps: tuple[type[Step], ...] = STEPS
    #: The code before and after the options, as the user writes them; `nano-loop tune` prints it.
    written: tuple[str, str] = ("@nano(", ")")
    #: A hint on how to set up objects.
    setup_hint: str = "Pass the models and optimizers as arguments"

    def __init__(self, settings: Settings, names: Mapping[str, Any], loop: Loop) -> None:
        super().__init__(names, loop)
        self.settings = settings

    @abstractmethod
    def do(self, run: Run) -> Any:
        """Execute the task in a started run."""

    @override
    def run_in(self, slot: RankSlot) -> Any:
        step_types = None if slot.ranks.context.witness is None else WITNESS_STEPS
        return Run(self.settings, self, slot=slot, step_types=step_types).complete()


class Run:
    """One run, as a context manager: it joins the ranks on entry and undoes all steps, in reverse order, on exit.

    `task` is the work of ranks in other processes; None for a run of one process. `slot` is this process's place in a
    run whose ranks have already been joined; otherwise, `launcher` joins them, which the options and the environment
    select by default. The report lines in `printed` are not printed again. `outer` is a run in the same process and
    with the same report. A run `in_all_threads` applies to all threads that are not in another run, and not only to the
    thread that enters it.
    """

    def __init__(
        self,
        settings: Settings,
        task: RunTask | None = None,
        *,
        slot: RankSlot | None = None,
        launcher: Launcher | None = None,
        printed: list[str] | None = None,
        outer: Run | None = None,
        step_types: Sequence[type[Step]] | None = None,
        in_all_threads: bool = False,
    ) -> None:
        self.options = settings.options
        self._task = task
        own = RunReport(settings.options, [] if printed is None else printed)
        self._results: RunReport = own if outer is None else outer._results
        self._is_inner = outer is not None
        self._is_set_up = False  # True after the first setup()
        self._joined = nullcontext(slot) if slot else joined(settings.options, settings.machine, task, launcher)
        self._slot: RankSlot | None = None
        # Without a block that bounds the run, models that are set up automatically predict as without nano_loop.
        self._interceptors = CallInterceptors(self._is_inner and self.options.kind.parameters is None)
        self._step_types = _default_steps(task) if step_types is None else step_types
        self._steps: list[Step] = []
        self.in_all_threads = in_all_threads
        #: Notices steps of optimizers, including those that were not set up, from entry on. None in a nested run.
        self.stepped: SteppedOptimizers | None = None
        self._ending = ExitStack()

    @property
    def report(self) -> SetupReport | None:
        """The steps that were applied and skipped; None before the first `setup`."""
        return self._results.report

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run, as seen from this process."""
        return self._active_slot.ranks

    @property
    def written(self) -> tuple[str, str]:
        """The code before and after the options, as the user writes them."""
        return ("nano_loop.accelerated(", ")") if self._task is None else self._task.written

    def __repr__(self) -> str:
        report = self.report
        steps = "nothing is set up" if report is None else f"applied {', '.join(report.applied) or 'nothing'}"
        return f"<nano_loop run: {steps}>"

    def __enter__(self) -> Run:
        try:
            self._enter(self._ending)
        except BaseException:
            if not self._ending.__exit__(*sys.exc_info()):
                raise
        return self

    def _enter(self, ending: ExitStack) -> None:
        slot = self._slot = ending.enter_context(self._joined)
        ending.callback(self._leave)
        # A run that the program never leaves ends before the interpreter tears down its objects.
        atexit.register(self.end)
        ending.callback(atexit.unregister, self.end)
        ending.callback(_active.pop, self, None)  # not in Python, where Ctrl-C may strike
        _active[self] = None
        accelerated = partial(accelerated_copy, Settings(self.options, slot.machine))
        self._clock = StepClock()
        ending.callback(self._clock.close)
        self._memory = MemoryWatch(self.options, slot.ranks, self._clock, self._interceptors)
        ending.push(self._memory.explain)
        context = StepContext(self.options, slot.machine, self._interceptors, slot.ranks, accelerated, self._clock)
        if self.options.split_batches and slot.ranks.size > 1 and not self._is_inner:
            ending.enter_context(slot.ranks.sharing_batches())
        self._steps = [step(context) for step in self._step_types]
        ending.callback(self._interceptors.close)
        for step in self._steps:
            ending.callback(step.undo)
        ending.push(self._close_report)
        if slot.ranks.size > 1:
            ending.enter_context(forked_children_ending())
        if self.options.verbose and slot.ranks.rank == 0:
            ending.enter_context(compilation_announced(lambda line: print_lines([line])))
        if not self._is_inner:
            self.scope = RunScope(slot.ranks, self.in_all_threads)
            hint = _SETUP_HINT if self._task is None else self._task.setup_hint
            unmet = partial(self._results.unmet_of, self._steps, are_errors=True)
            self.stepped = SteppedOptimizers(slot.ranks, self.scope, hint, self.apply, unmet, self._clock)
            ending.enter_context(self.stepped.looking())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._ending.__exit__(kind, error, traceback)

    def complete(self) -> Any:
        """Start the run, execute its task, end the run, and return the result of the task."""
        assert self._task is not None
        try:
            with self:
                return self._task.do(self)
        except BaseException as error:
            # The message has the other rank's traceback. Our frames, where this rank waited for it, do not help.
            trim_tracebacks(error, keeps_last=not isinstance(error, (NanoConfigError, NanoWorkerError)))
            raise error  # before Python 3.11, a bare raise shows the whole traceback
        finally:
            self.end()

    def inner(self, step_types: Sequence[type[Step]] | None = None, **changes: Any) -> Run:
        """Start and return a nested run with the same report and some options changed. It lasts until it is exited."""
        options = self.options.changed(changes) if changes else self.options
        return Run(
            Settings(options, self._active_slot.machine), slot=self._active_slot, outer=self, step_types=step_types
        ).__enter__()

    def end(self) -> None:
        """Undo the remaining changes: if Ctrl-C interrupted the first line of `__exit__`, or the program never left."""
        self._ending.__exit__(*sys.exc_info())

    def setup(self, model: Any, optimizer: Any = (), *dataloaders: DataLoader[Any]) -> Any:
        """Accelerate models, optimizers and loaders in place, until the run ends.

        Arguments, results and errors are those of `nano_loop.TorchNano.setup`, except that `model` may also be a list
        or a tuple of models.
        """
        self.apply(TrainingObjects.of(model, optimizer, dataloaders))
        if isinstance(optimizer, tuple) and not (optimizer or dataloaders):
            return model
        if not dataloaders:
            return model, optimizer
        return model, optimizer, dataloaders[0] if len(dataloaders) == 1 else list(dataloaders)

    def apply(self, parts: TrainingObjects, first: Sequence[StepResult] = ()) -> None:
        """Apply the steps to the objects of a ``setup`` call, and print the new entries of the report.

        `first` are entries before those of the steps. Raises a `NanoConfigError` if an explicitly requested step does
        not apply.
        """
        slot = self._active_slot
        if self.stepped is not None:
            self.stepped.add(parts)
        self._clock.add(parts.optimizers)
        for step in self._steps:
            step.observe(parts)
        results = [self._apply(step, parts) for step in self._steps if self._is_relevant(step, parts)]
        tensors = chain.from_iterable(map(parameters_of, parts.models))
        for dtype in {torch.float32, *(tensor.dtype for tensor in tensors)}:
            resolve_mkl_functions(dtype)
        self._memory.add(parts)
        self._is_set_up = True
        self._results.add(slot, [*first, *results])

    @property
    def unmet_inside(self) -> Iterable[tuple[str, str, str]]:
        """Options set to True that did not apply to anything in any nested run, with reasons and hints."""
        return (self._results.unmet or {}).values()

    def note(self, result: StepResult) -> None:
        """Add an entry to the report."""
        self._results.add(self._active_slot, [result])

    def without_averaging(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the gradients of `model` are not averaged over the ranks."""
        steps = (step for step in self._steps if isinstance(step, GradientAveraging))
        return next((step.without_averaging(model) for step in steps), nullcontext())

    @property
    def _active_slot(self) -> RankSlot:
        if self._slot is None:
            got = "setup was called outside a run"
            expected = "its changes are undone when the run ends"
            raise NanoError(error_message(got, expected, "Call it while the run is active"))
        return self._slot

    def _leave(self) -> None:
        self._slot = None

    def _close_report(self, kind: type[BaseException] | None, *_: object) -> None:
        """Add the final results of the steps to the report, unless the run raised."""
        if kind is None and self.report is not None:
            results = [step.final_result() for step in self._steps]
            if self.stepped is not None and self.options.fused_optimizer:
                results.append(self.stepped.final_result())
            results.append(self._memory.final_result())  # the last line
            self._results.add_final(self._active_slot, [result for result in results if result is not None])
            if self._is_inner and self._step_types is STEPS:
                self._results.note_unmet(self._steps)

    def _is_relevant(self, step: Step, parts: TrainingObjects) -> bool:
        if not step.enabled or (step.once and self._is_set_up):
            return False
        return step.is_relevant(parts)

    def _apply(self, step: Step, parts: TrainingObjects) -> StepResult:
        reason = step.skip_reason(parts)
        if reason is None:
            return StepResult(step.name, "applied", step.apply(parts))
        if step.required:
            got = f"{step.name}=True"
            raise NanoConfigError(error_message(got, reason.detail, f"Remove {got}"))
        idle = reason.idle if getattr(self.options, step.name, "auto") == "auto" else ""
        return StepResult(step.name, "skipped", reason.detail, code=reason.code, idle=idle)


def _default_steps(task: RunTask | None) -> tuple[type[Step], ...]:
    """Return the steps of a task, or all; none in a script that `nano-loop tune` times without nano_loop."""
    command = take_command()
    if command is not None and command.arguments.get("is_plain"):
        return ()
    return STEPS if task is None else task.steps


_SETUP_HINT = "Call run.setup(model, optimizer) before the first step"


@contextmanager
def accelerated_copy(settings: Settings, model: nn.Module, **changes: Any) -> Iterator[Run]:
    """Accelerate a copy of a model in one process, with some options changed and without printing the report."""
    options = settings.options.for_nested_run(**changes)
    with Run(Settings(options, settings.machine), launcher=Alone(options)) as run:
        run.setup(model)
        yield run
