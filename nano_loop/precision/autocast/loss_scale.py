"""Dynamic loss scaling inside a backward, so that the loop, its losses and its gradients have no scale.

fp16 has no numbers below 6e-8, so small gradients are zero in it. With `torch.amp.GradScaler` a loop multiplies its
loss, and has to divide gradients, skip steps and update the scale itself. Here `backward` does it: the gradient of what
it begins with is multiplied, and divided where it reaches a leaf, before any hook of the loop and before it is added to
``.grad``. So clipping, accumulation, penalties on weights and hooks are those of the plain loop. The scale is a power
of two, so no rounding is added.

Method: Micikevicius et al., "Mixed Precision Training", 2018; the constants are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nano_loop.errors import NanoWarning, error_message
from nano_loop.patching.calls.backward import backwards_run_by, nested_backwards_noticed
from nano_loop.patching.objects.optimizers import (
    held_by,
    hook_after_steps,
    hook_before_steps,
    once_gradients_exist,
)
from nano_loop.patching.torch_private import in_functorch
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.precision.autocast.scaled_backward import (
    Call,
    at,
    divided,
    multiplied,
    not_finite,
    paused,
    reached_from,
    retained_divided,
    several,
    this_thread,
    torch_knows_of_scales,
)

FIRST = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
#: The least scale. Where gradients overflow with it, they would without one.
LEAST = 2.0
#: After how many backwards without an overflow the scale grows.
INTERVAL = 2000


class LossScale:
    """The scale of a run, and the leaves whose gradients have overflowed.

    Attributes
    ----------
    value : float
        The scale, a power of two.
    good : int
        How many backwards there were since it was changed.
    skipped : int
        How many steps of optimizers were skipped.
    users_scaler : bool
        Whether the loop has a `GradScaler`, which then scales alone.
    """

    def __init__(self) -> None:
        self.value, self.good, self.skipped, self.users_scaler = FIRST, 0, 0, False
        self._known: set[int] = set()  # the ids of leaves that had scaled gradients
        self._overflowed: dict[int, Tensor] = {}  # by their ids
        self._aside: list[tuple[Tensor, Tensor | None]] = []  # gradients that a skipped step does not see
        self._of_checkpoints: list[Tensor] = []

    @contextmanager
    def scaling(self) -> Iterator[None]:
        """Scale the backwards of this thread that reach set-up models, and let optimizers skip."""
        before, retaining = this_thread.scale, this_thread.retaining
        with ExitStack() as stack:
            for context in (nested_backwards_noticed(), backwards_run_by(self._backward), torch_knows_of_scales()):
                stack.enter_context(context)
            # Of all optimizers, since a loop may make one itself.
            for register, hook in (
                (hook_before_steps, once_gradients_exist(self._before_step)),
                (hook_after_steps, lambda *_: self._put_back()),
            ):
                stack.callback(register(hook).remove)
            this_thread.scale = self
            try:
                yield
            finally:
                this_thread.scale, this_thread.retaining = before, retaining
                self._put_back()

    def begin(self, roots: Sequence[Any]) -> tuple[float, list[Tensor]]:
        """Return the factor for a backward from these tensors, 1 if it is not to be scaled, and the leaves it reaches.

        Parameters
        ----------
        roots : sequence of torch.Tensor
            What the backward begins with.
        """
        if self.users_scaler or in_functorch() or not all(isinstance(root, Tensor) for root in roots):
            return 1.0, []
        reached, leaves = reached_from(roots)
        if not reached:
            return 1.0, leaves
        self._known |= set(map(id, leaves))
        return self.value, leaves

    def note(self, overflowed: bool) -> None:
        """Halve the scale after a backward that has overflowed, and double it after many that have not."""
        self.good += 1
        if overflowed:
            if self.value <= LEAST:
                got = "Gradients are infinite or not a number, also without a loss scale"
                hint = "Lower the learning rate, or look for a division by zero"
                warnings.warn(error_message(got, "training needs finite ones", hint), NanoWarning, stacklevel=2)
            self.value, self.good = max(self.value * BACKOFF, LEAST), 0
        elif self.good >= INTERVAL:
            self.value, self.good = self.value * GROWTH, 0

    def _backward(self, original: Call, tensors: Any, grad_tensors: Any = None, *args: Any, **kw: Any) -> Any:
        roots = several(tensors)
        if in_backward():
            with self._inner(roots, grad_tensors):
                return original(roots, grad_tensors, *args, **kw)
        factor, leaves = self.begin(roots)
        gradients = multiplied(roots, grad_tensors, factor)
        if gradients is None or not _are_leaves(kw.get("inputs", args[3] if len(args) > 3 else None)):
            return original(roots, grad_tensors, *args, **kw)
        # Whatever is finite again has been set to zero by the loop.
        self._overflowed = {id(leaf): leaf for leaf in not_finite(self._overflowed.values())}
        self._of_checkpoints.clear()
        with at(factor), divided(leaves, factor), retained_divided(factor):
            original(roots, gradients, *args, **kw)
        leaves = [*leaves, *self._of_checkpoints]
        self._of_checkpoints.clear()
        overflowed = {id(leaf): leaf for leaf in not_finite(leaves)}
        self.note(overflowed=bool(overflowed.keys() - self._overflowed.keys()))
        self._overflowed |= overflowed
        return None

    def _inner(self, roots: Sequence[Any], gradients: Any) -> AbstractContextManager[None]:
        """Return the context for a backward inside of another one, of a reentrant checkpoint if gradients are given.

        Its inputs are leaves, and hand their gradients on to the outer backward. Only those of torch's own checkpoint
        are known; in any other one, parameters alone are divided.
        """
        if this_thread.factor == 1:
            return nullcontext()
        detached, this_thread.detached = this_thread.detached, set()
        if gradients is None or not all(isinstance(root, Tensor) for root in roots):
            return paused()
        leaves = [leaf for leaf in reached_from(roots)[1] if id(leaf) not in detached]
        leaves = leaves if detached else [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        self._of_checkpoints += leaves
        self._known |= set(map(id, leaves))
        return divided(leaves, this_thread.factor)

    def _before_step(self, optimizer: Optimizer) -> None:
        """Skip the step if a gradient has overflowed: without gradients, optimizers change nothing."""
        self._put_back()  # after a step that raised
        held = held_by(optimizer)
        if this_thread.scale is not self or self.users_scaler or self._known.isdisjoint(map(id, held)):
            return
        # Also what the loop has assigned, and what overflows in the backward under way.
        if not self._overflowed.keys().isdisjoint(map(id, held)) or not_finite(held):
            self.skipped += 1
            self._aside = [(leaf, leaf.grad) for leaf in held]
            for leaf in held:
                leaf.grad = None

    def _put_back(self) -> None:
        """Give the loop the gradients back that a skipped step has not seen."""
        for leaf, gradient in self._aside:
            if leaf.grad is None:
                leaf.grad = gradient
        self._aside.clear()


def _are_leaves(inputs: Any) -> bool:
    """Whether a backward is for leaves, as it is without `inputs`."""
    return inputs is None or all(isinstance(leaf, Tensor) and leaf.is_leaf for leaf in several(inputs))
