"""Notes which fp32 tensor is the copy of which bf16 tensor, so that an operator can read and keep the smaller one.

Models often cast their logits to fp32 before the loss. The values stay those of the bf16 tensor, and so does the
gradient, which is cast back. An operator on the copy can compute the same from the bf16 tensor, and hand its gradient
over in bf16: then neither the copy nor its gradient, each of twice the size, exists during the backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from nano_loop.patching.attributes import replaced
from nano_loop.patching.ownership import belongs_to_set_up_model
from nano_loop.patching.torch_private import base_of, in_functorch, version
from nano_loop.patching.torch_private_autograd import graph_task, has_tensor_hooks, reaches

#: Minimum number of elements of a cast that is noted. Below it, a cast takes less than the note.
WORTH_NOTING = 1 << 20


class Upcast:
    """One cast, from bf16 to fp32."""

    def __init__(self, source: Tensor) -> None:
        self._source, self._copy = weakref.ref(source), lambda: None  # type: Any, Any
        self._versions = version(source), 0
        self._gradient: tuple[int, Tensor] | None = None  # with the number of its backward
        #: Whether something looks at the gradient of the copy, or of a view of it.
        self.watched = False

    def note(self, copy: Tensor) -> None:
        """Note the result of the cast."""
        self._copy, self._versions = weakref.ref(copy), (self._versions[0], version(copy))
        _noted[copy] = self

    @property
    def copy(self) -> Tensor | None:
        """The fp32 tensor, or None if nothing holds it any more. Then nothing can see its gradient either."""
        copy: Tensor | None = self._copy()
        return copy

    def source(self) -> Tensor | None:
        """Return the bf16 tensor, or None if nothing holds it, or one of the two was written to."""
        source, copy = self._source(), self.copy
        if source is None or copy is None or (version(source), version(copy)) != self._versions:
            return None
        return source  # type: ignore[no-any-return]

    @property
    def gradient_is_unobserved(self) -> bool:
        """Whether nobody can see the gradient of the copy, or of a view of it, in the backward under way."""
        copy = self.copy
        if self.watched or copy is None:  # who holds a view of it also holds the copy
            return not self.watched
        return not _is_watched(copy) and _is_plain_backward(copy.grad_fn)

    def hand_over(self, gradient: Tensor) -> Tensor:
        """Hand over a gradient of the copy in bf16, and return the zeros that stand in its place in the graph.

        Parameters
        ----------
        gradient : torch.Tensor
            Of the copy's shape. It is changed by a second gradient of the same backward.

        Returns
        -------
        torch.Tensor
            fp32, of the same shape, and of no size in memory.
        """
        task, earlier = graph_task(), self._gradient
        if earlier is not None and earlier[0] == task:
            gradient = earlier[1].add_(gradient)
        self._gradient = task, gradient
        return _ZERO.expand(gradient.shape)

    def take(self) -> Tensor | None:
        """Return the gradient that this backward has handed over, once, or None."""
        gradient, self._gradient = self._gradient, None
        return gradient[1] if gradient is not None and gradient[0] == graph_task() else None


class _Held(threading.local):
    """The casts of the call that this thread is in, or None, and so that their copies live as long, the copies."""

    casts: list[tuple[Upcast, Tensor]] | None = None


held = _Held()
_noted = WeakTensorKeyDictionary()  # by the copy
_kept = WeakTensorKeyDictionary()  # by the copy, bf16 tensors that are to live as long
_ZERO = torch.zeros(())
_LEAF = torch.zeros((), requires_grad=True)  # its gradient stays None
_MOST_VIEWS = 8  # one of another, that are looked through


def keep_source(copy: Tensor, source: Tensor) -> None:
    """Let the bf16 tensor live as long as its copy, which the model returns: an operator may get that in the loop."""
    if copy in _noted:
        _kept[copy] = source


def upcast_of(tensor: Tensor, input: Tensor) -> Upcast | None:
    """Return the cast that a tensor, or the whole tensor that it is a view of, is the result of, or None.

    Parameters
    ----------
    tensor : torch.Tensor
        A view has another shape, but the same elements in the same order.
    input : torch.Tensor
        What the loop or the model has, of which `tensor` is a view. There is no cast if something looks at the gradient
        of it, or of the result of the cast.
    """
    base = base_of(tensor)
    upcast: Upcast | None = _noted[base] if base in _noted else None  # noqa: SIM401  # its `get` has no types
    whole = tensor.numel() == base.numel() and tensor.is_contiguous() and base.is_contiguous()
    if upcast is None or not whole or _is_watched(input) or _is_watched(base):
        return None
    return upcast if _is_view_by_torch(input, base) else None


def _is_plain_backward(cast: Any) -> bool:
    """Whether the backward under way is that of ``backward()``, without ``inputs``, which alone returns no gradients.

    `torch.autograd.grad` and ``backward(inputs=...)`` may return the gradient of a tensor in the midst of the graph.
    They reach no leaf that they do not name, and nobody can name the one that each cast has besides.
    """
    return reaches(cast.next_functions[-1][0])


def _is_watched(tensor: Tensor) -> bool:
    return tensor.retains_grad or has_tensor_hooks(tensor)


def _is_view_by_torch(view: Tensor, copy: Tensor) -> bool:
    """Whether only operators of torch lead to a view: backward hooks of modules are others, and see gradients."""
    node: Any = view.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is copy.grad_fn:
            return True
        if node is None or isinstance(node, BackwardCFunction) or not node.next_functions:
            return False
        node = node.next_functions[0][0]
    return False


def copy_in(casts: list[tuple[Upcast, Tensor]], tensor: Tensor) -> Tensor | None:
    """Return the copy that one of these casts has made of a bf16 tensor, or None."""
    return next((copy for upcast, copy in casts if upcast.source() is tensor), None)


@contextmanager
def upcasts_noted() -> Iterator[None]:
    """Note the casts by `torch.Tensor.float` and `torch.Tensor.to` in calls into set-up models, and what gets hooks."""
    with ExitStack() as stack:
        for name in ("float", "to"):
            stack.enter_context(replaced(Tensor, name, _noting))
        for name in ("register_hook", "retain_grad"):
            stack.enter_context(replaced(Tensor, name, _noting_watch))
        yield


def _noting_watch(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        base = base_of(self)
        if base in _noted:
            _noted[base].watched = True
        return original(self, *args, **kwargs)

    method.__name__, method.__doc__ = original.__name__, original.__doc__
    return method


def _noting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype is torch.bfloat16 and _is_to_fp32(original, args, kwargs) and _is_noted(self):
            upcast = Upcast(self)
            copy: Tensor = _Upcast.apply(self, upcast, _LEAF)  # type: ignore[no-untyped-call]
            upcast.note(copy)
            if held.casts is not None:
                held.casts.append((upcast, copy))
            return copy
        return original(self, *args, **kwargs)

    method.__name__, method.__doc__ = original.__name__, original.__doc__
    return method


def _is_to_fp32(original: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if original.__name__ == "float":
        return not args and not kwargs
    return (args == (torch.float32,) and not kwargs) or (not args and kwargs == {"dtype": torch.float32})


def _is_noted(tensor: Tensor) -> bool:
    return (
        tensor.numel() >= WORTH_NOTING
        and type(tensor) is Tensor
        and tensor.requires_grad
        and torch.is_grad_enabled()
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and not torch.compiler.is_compiling()
        and not in_functorch()
        and belongs_to_set_up_model()  # also where an activation checkpoint recomputes the cast in a backward
    )


class _Upcast(torch.autograd.Function):
    """A cast from bf16 to fp32 whose gradient may be handed over in bf16."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, upcast: Upcast, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.upcast = upcast
        return source.to(torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        own = ctx.upcast.take()
        if own is None or gradient is None:
            return None if gradient is None else gradient.to(torch.bfloat16), None, None
        if gradient.untyped_storage().data_ptr() == _ZERO.untyped_storage().data_ptr():
            return own.view(gradient.shape), None, None
        return own.view(gradient.shape).add_(gradient), None, None  # of others that read the copy
