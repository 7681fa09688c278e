"""The clock of a run: it counts the steps of the run's optimizers, times them, and tells others of each."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.optim import Optimizer

from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with

#: Takes an optimizer and the arguments of its step. Returns None, or other arguments.
Before = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Optimizer], object]
#: Ends a subscription.
Cancel = Callable[[], object]


class StepClock:
    """Counts the steps of a run's optimizers. Whatever asks which step it is asks this clock.

    Each optimizer has one pair of hooks, which stands among the program's own hooks where the set-up was. Functions are
    called in the order in which they have subscribed, in any thread. Steps of other threads than that of the run are
    neither counted nor timed.

    A step that raises has no end; the next one begins anew. Where a class overrides ``step`` and calls that of its
    base, torch calls the hooks of both: such a step ends once, with the inner one.

    Attributes
    ----------
    steps : int
        How many steps have ended.
    began : float
        When the first one has, in seconds.
    thread : int
        The thread whose steps count.
    shortest : float
        The least seconds from the end of a step to the end of the next, of any optimizers.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.began, self.shortest = 0.0, math.inf
        self._ended = 0.0
        self.thread = threading.get_ident()
        self._optimizers: Any = WeakIdKeyDictionary()
        # Tuples, which do not change while their functions are called.
        self._before: tuple[Before, ...] = ()
        self._after: tuple[After, ...] = ()
        self._due: dict[object, tuple[int, Callable[[], object]]] = {}
        self._next: float = math.inf  # the least number of a step in `_due`
        self._open: set[int] = set()  # the ids of optimizers whose steps have begun
        self._undoing = ExitStack()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers whose steps count, as far as the program has them."""
        return [*self._optimizers]

    @property
    def is_here(self) -> bool:
        """Whether this is the thread whose steps count."""
        return threading.get_ident() == self.thread

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Count the steps of these, too, until `close`."""
        for optimizer in optimizers:
            if optimizer not in self._optimizers:
                self._optimizers[optimizer] = None
                undoing = undone_with(optimizer, self._undoing)
                undoing.callback(optimizer.register_step_pre_hook(self._begin).remove)
                undoing.callback(optimizer.register_step_post_hook(self._end).remove)

    def before(self, function: Before) -> Cancel:
        """Call a function before each step, until the result of this is called."""
        self._before = (*self._before, function)
        return partial(self._cancel, "_before", function)

    def after(self, function: After) -> Cancel:
        """Call a function after each step, until the result of this is called."""
        self._after = (*self._after, function)
        return partial(self._cancel, "_after", function)

    def in_steps(self, count: int, function: Callable[[], object]) -> Cancel:
        """Call a function once, after so many steps from now."""
        key = object()
        self._due[key] = self.steps + count, function
        self._next = min(self._next, self.steps + count)
        return partial(self._due.pop, key, None)

    def at_doublings(self, function: Callable[[], object], first: int = 1) -> Cancel:
        """Call a function after so many steps from now, such as 8, and after 16, 32, and so on."""
        stack, begun = ExitStack(), self.steps

        def call() -> None:
            stack.callback(self.in_steps(self.steps - begun, call))
            function()

        stack.callback(self.in_steps(first, call))
        return stack.close

    def close(self) -> None:
        """Take all hooks away."""
        self._undoing.close()

    def _cancel(self, name: str, function: Any) -> None:
        setattr(self, name, tuple(other for other in getattr(self, name) if other != function))

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Tell of a step that begins. torch takes what this hook returns as the arguments of the step."""
        self._open.add(id(optimizer))
        changed = None
        for function in self._before:
            result = function(optimizer, args, kwargs)
            if result is not None:
                changed = args, kwargs = result
        return changed

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step that has ended, and tell of it."""
        if id(optimizer) not in self._open:
            return
        self._open.discard(id(optimizer))
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
            if key in self._due:  # one may cancel another
                _, function = self._due.pop(key)
                function()
        self._next = min((step for step, _ in self._due.values()), default=math.inf)
