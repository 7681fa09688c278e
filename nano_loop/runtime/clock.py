"""The clock of a run: it counts and times the steps of the run's optimizers, and notifies subscribers."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.optim import Optimizer

from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with
from nano_loop.patching.optimizers import called_in_turn

#: Called with an optimizer and the arguments of its step. Returns None, or replacement arguments.
Before = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Optimizer], object]
#: Ends a subscription.
Cancel = Callable[[], object]


class StepClock:
    """Counts the steps of a run's optimizers, for all code in this process that acts at a step.

    Functions are called in the order of their subscriptions, in any thread; steps in other threads do not count. A step
    that raises does not end. If a class overrides ``step`` and calls its base's ``step``, torch calls the hooks of
    both; such a step ends once, with the outer one.
    """

    def __init__(self) -> None:
        self.steps = 0  # the number of steps that have ended
        self.began = self._ended = 0.0  # the times when the first and the last step ended, in seconds
        #: The minimum seconds from the end of a step to the end of the next, of any optimizer.
        self.shortest = math.inf
        self.thread = threading.get_ident()  # the thread whose steps count
        self._optimizers: Any = WeakIdKeyDictionary()
        # Tuples, so that they do not change while their functions are called.
        self._before: tuple[Before, ...] = ()
        self._after: tuple[After, ...] = ()
        self._due: dict[object, tuple[int, Callable[[], object]]] = {}
        self._next: float = math.inf  # the smallest step number in `_due`
        self._open: dict[int, int] = {}  # the frames that called the hooks of steps that have begun, by optimizer's id
        self._undoing = ExitStack()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers whose steps count and that the program still holds."""
        return [*self._optimizers]

    @property
    def is_here(self) -> bool:
        """Whether this is the thread whose steps count."""
        return threading.get_ident() == self.thread

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Also count the steps of these optimizers until `close`."""
        for optimizer in optimizers:
            if optimizer not in self._optimizers:
                self._optimizers[optimizer] = None
                undoing = undone_with(optimizer, self._undoing)
                undoing.callback(optimizer.register_step_pre_hook(self._begin).remove)
                undoing.callback(optimizer.register_step_post_hook(self._end).remove)

    def before(self, function: Before) -> Cancel:
        """Call a function before each step. Call the result to cancel."""
        self._before = (*self._before, function)
        return partial(self._cancel, "_before", function)

    def after(self, function: After) -> Cancel:
        """Call a function after each step. Call the result to cancel."""
        self._after = (*self._after, function)
        return partial(self._cancel, "_after", function)

    def in_steps(self, count: int, function: Callable[[], object]) -> Cancel:
        """Call a function once, after this many steps from now."""
        key = object()
        self._due[key] = self.steps + count, function
        self._next = min(self._next, self.steps + count)
        return partial(self._due.pop, key, None)

    def at_doublings(self, function: Callable[[], object], first: int = 1) -> Cancel:
        """Call a function after `first` steps from now, such as 8, and after 16, 32, and so on."""
        stack, begun = ExitStack(), self.steps

        def call() -> None:
            stack.callback(self.in_steps(self.steps - begun, call))
            function()

        stack.callback(self.in_steps(first, call))
        return stack.close

    def close(self) -> None:
        """Remove all hooks."""
        self._undoing.close()

    def _cancel(self, name: str, function: Any) -> None:
        setattr(self, name, tuple(other for other in getattr(self, name) if other != function))

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Notify subscribers that a step begins. torch uses the return value as the arguments of the step."""
        key = id(optimizer)
        if key not in self._open or not _is_called_by(self._open[key]):
            self._open[key] = id(sys._getframe(1))
        return called_in_turn(self._before, optimizer, args, kwargs)

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step that has ended, and notify subscribers."""
        frame = self._open.get(id(optimizer))
        if frame is None or _is_called_by(frame):
            return
        del self._open[id(optimizer)]
        if threading.get_ident() == self.thread:
            now = time.perf_counter()
            if not self.steps:
                self.began = now
            elif now - self._ended < self.shortest:
                self.shortest = now - self._ended
            self._ended = now
            self.steps += 1
        for function in self._after:
            function(optimizer)
        if self.steps >= self._next:
            self._call_due()

    def _call_due(self) -> None:
        due = [key for key, (step, _) in self._due.items() if step <= self.steps]
        for key in due:
            if key in self._due:  # one function may cancel another
                _, function = self._due.pop(key)
                function()
        self._next = min((step for step, _ in self._due.values()), default=math.inf)


def _is_called_by(caller: int) -> bool:
    """Whether the hook's caller was called by the frame with the id `caller`, and has not got that id itself since."""
    frame = sys._getframe(2)
    if id(frame) == caller:
        return False
    outer = frame.f_back
    while outer is not None and id(outer) != caller:
        outer = outer.f_back
    return outer is not None
