"""The parts of a scaled backward: what it begins with, the leaves that it reaches, and what the loop sees of it.

A backward inside of another one is one of two kinds. A reentrant checkpoint hands on gradients that are multiplied
already. Any other, as in a hook or in a custom function, is left alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge
from torch.utils import checkpoint

from nano_loop.patching.attributes import replaced
from nano_loop.patching.ownership import was_made_inside
from nano_loop.patching.torch_private import version
from nano_loop.patching.torch_private_autograd import hook_first, in_backward, node_number
from nano_loop.precision.autocast.autocast import LOW_DTYPES

Call = Callable[..., Any]

#: The smaller scale with which `autograd.grad` tries again. It has no optimizer that could skip.
_SECOND_TRY = 2.0**-8


class Scale(Protocol):
    """The scale of a run, as far as a backward needs it; see `nano_loop.precision.autocast.loss_scale.LossScale`."""

    users_scaler: bool

    def begin(self, roots: Sequence[Any]) -> tuple[float, list[Tensor]]:
        """Return the factor for a backward, and the leaves that it reaches."""

    def note(self, overflowed: bool) -> None:
        """Change the scale after a backward."""


class Thread(threading.local):
    """The scaling of this thread's run."""

    def __init__(self) -> None:
        self.scale: Scale | None = None
        #: By what gradients are multiplied in the backward under way.
        self.factor = 1.0
        #: The ids of the leaves whose gradients are divided in it.
        self.divided: set[int] = set()
        #: Whether a backward inside of it runs that is left alone.
        self.paused = False
        #: The ids of the inputs that a reentrant checkpoint has just detached.
        self.detached: set[int] = set()
        #: The tensors that keep their gradients, besides leaves.
        self.retaining: list[weakref.ref[Tensor]] = []


this_thread = Thread()


# --- what a backward begins with, and ends at ---


def several(tensors: Any) -> Sequence[Any]:
    """Return what a backward begins with, or its inputs, as a sequence."""
    single = isinstance(tensors, (Tensor, GradientEdge)) or not isinstance(tensors, Iterable)
    return (tensors,) if single else tuple(tensors)


def reached_from(roots: Sequence[Tensor]) -> tuple[bool, list[Tensor]]:
    """Return whether a graph has nodes that set-up models made, and the leaves that it reaches."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves = [root for root in roots if root.is_leaf and root.requires_grad]
    seen, is_reached = set(waiting), False
    while waiting:
        node = cast(Any, waiting.pop())
        is_reached = is_reached or was_made_inside(node_number(node))
        for below, _ in node.next_functions:
            if below is None or below in seen:
                continue
            seen.add(below)
            if below.name() == "torch::autograd::AccumulateGrad":
                leaves.append(below.variable)
            else:
                waiting.append(below)
    return is_reached, leaves


def multiplied(roots: Sequence[Tensor], gradients: Any, factor: float) -> list[Any] | None:
    """Return the gradients to begin with, multiplied; None without a factor, or where torch is to raise its error."""
    root_gradients = [None] * len(roots) if gradients is None else several(gradients)
    if factor == 1 or len(root_gradients) != len(roots):
        return None
    if any(gradient is None and root.numel() != 1 for root, gradient in zip(roots, root_gradients, strict=True)):
        return None
    pairs = zip(roots, root_gradients, strict=True)
    return [(torch.ones_like(root) if gradient is None else gradient) * factor for root, gradient in pairs]


def not_finite(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors whose gradient is not finite."""
    held = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
    if not held:
        return []
    finite = torch.stack([_sum(gradient) for _, gradient in held]).isfinite().tolist()
    return [tensor for (tensor, _), good in zip(held, finite, strict=True) if not good]


def _sum(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient's elements in fp64, which is finite if they are: one pass, without memory."""
    gradient = gradient.detach()
    return (gradient.sum(dtype=torch.float32) if gradient.dtype in LOW_DTYPES else gradient.sum()).abs().double()


# --- what surrounds it ---


@contextmanager
def at(factor: float) -> Iterator[None]:
    """Note the factor that multiplies the gradients of a backward."""
    before, this_thread.factor = this_thread.factor, factor
    try:
        yield
    finally:
        this_thread.factor = before


@contextmanager
def divided(leaves: Iterable[Tensor], factor: float) -> Iterator[None]:
    """Divide the gradients that reach these leaves, before their own hooks see them."""

    def divide(gradient: Tensor) -> Tensor | None:
        return None if this_thread.paused else gradient * (1 / factor)

    new = {id(leaf): leaf for leaf in leaves if id(leaf) not in this_thread.divided and leaf.requires_grad}
    with ExitStack() as stack:
        for leaf in new.values():
            stack.callback(hook_first(leaf, divide))
        this_thread.divided |= new.keys()
        try:
            yield
        finally:
            this_thread.divided -= new.keys()


@contextmanager
def paused() -> Iterator[None]:
    """Divide nothing in a backward inside of another one."""
    before, this_thread.paused = this_thread.paused, True
    try:
        yield
    finally:
        this_thread.paused = before


@contextmanager
def retained_divided(factor: float) -> Iterator[None]:
    """Divide the gradients that other tensors than leaves keep."""
    held = [(tensor, tensor.grad) for tensor in (ref() for ref in this_thread.retaining) if tensor is not None]
    for tensor, _ in held:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, before in held:
            if tensor.grad is None:
                tensor.grad = before
            else:
                tensor.grad = tensor.grad / factor if before is None else before + tensor.grad / factor


# --- what else of torch has to know of it ---


@contextmanager
def torch_knows_of_scales() -> Iterator[None]:
    """Scale `autograd.grad` too, and keep the scale from what a loop sees: hooks, and gradients that are kept."""
    with ExitStack() as stack:
        for owner, name, make in (
            (torch.autograd, "grad", _around_grad),
            (Tensor, "register_hook", _around_register_hook),
            (Tensor, "retain_grad", _around_retain_grad),
            (GradScaler, "scale", _around_users_scale),
            (checkpoint, "detach_variable", _around_detach_variable),
        ):
            stack.enter_context(replaced(owner, name, make))
        yield


def _around_grad(original: Call) -> Call:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            with paused():
                return original(outputs, inputs, grad_outputs, *args, **kwargs)
        roots, wanted, scale = several(outputs), several(inputs), this_thread.scale
        factor, leaves = (1.0, []) if scale is None else scale.begin(roots)
        gradients = multiplied(roots, grad_outputs, factor)
        if scale is None or gradients is None or not all(isinstance(tensor, Tensor) for tensor in wanted):
            return original(outputs, wanted, grad_outputs, *args, **kwargs)
        # The graph is kept for another try. It is freed with the last reference to it.
        args, kwargs = ((True, *args[1:]), kwargs) if args else (args, {**kwargs, "retain_graph": True})
        grads = ()
        for smaller in (1.0, _SECOND_TRY, 1 / factor):
            run = functools.partial(
                original, roots, wanted, [gradient * smaller for gradient in gradients], *args, **kwargs
            )
            grads = _grad_divided(factor * smaller, leaves, wanted, run)
            good = all(bool(_sum(gradient).isfinite()) for gradient in grads if gradient is not None)
            scale.note(overflowed=not good)
            if good:
                break
        return grads

    return grad


def _grad_divided(factor: float, leaves: Sequence[Tensor], wanted: Sequence[Tensor], run: Call) -> Any:
    with at(factor), divided(leaves, factor), retained_divided(factor):
        gradients = run()
    known = {id(leaf) for leaf in leaves if leaf.requires_grad}
    pairs = zip(wanted, gradients, strict=True)
    return tuple(
        gradient if gradient is None or id(tensor) in known else gradient * (1 / factor) for tensor, gradient in pairs
    )


def _around_register_hook(original: Call) -> Call:
    """Give hooks of the loop gradients without the scale. Leaves have none when their hooks run."""

    @functools.wraps(original)
    def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        return original(self, hook if self.is_leaf else _unscaled(hook))

    return register_hook


def _unscaled(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    @functools.wraps(hook)
    def unscaled(gradient: Tensor) -> Any:
        factor = this_thread.factor
        if factor == 1:
            return hook(gradient)
        unscaled_gradient = gradient.float() / factor if gradient.dtype is torch.float16 else gradient / factor
        before = version(unscaled_gradient)
        replacement = hook(unscaled_gradient)
        if replacement is None and version(unscaled_gradient) != before:  # the hook has written to it
            replacement = unscaled_gradient
        return None if replacement is None else (replacement * factor).to(gradient.dtype)

    return unscaled


def _around_retain_grad(original: Call) -> Call:
    @functools.wraps(original)
    def retain_grad(self: Tensor) -> None:
        original(self)
        if not self.is_leaf:
            others = (other for other in this_thread.retaining if other() is not None and other() is not self)
            this_thread.retaining = [*others, weakref.ref(self)]

    return retain_grad


def _around_users_scale(original: Call) -> Call:
    @functools.wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        if this_thread.scale is not None:
            this_thread.scale.users_scaler |= self.is_enabled()
        return original(self, outputs)

    return scale


def _around_detach_variable(original: Call) -> Call:
    """Note the inputs of a reentrant checkpoint, whose gradients keep the scale."""

    @functools.wraps(original)
    def detach_variable(inputs: Any) -> Any:
        detached = original(inputs)
        this_thread.detached = {id(tensor) for tensor in detached if isinstance(tensor, Tensor)}
        return detached

    return detach_variable
