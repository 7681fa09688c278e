"""Outputs of batch and group norms that their readers write: an activation writes its result in one pass.

The first calls of a module show whether its output goes to an activation, or to a sum and then to a ReLU. From then on
the module returns a `PendingOutput` whose elements are not written. torch calls `PendingOutput.__torch_function__` for
whatever reads one or asks for its attributes. Unless it is such an activation, the elements are written then, the
tensor becomes a plain one, and the module's next outputs are written at once.

torch does not call it where C++ code takes a tensor for scripted code, or for a transform of `torch.func`:
`all_written` has them written before. Custom autograd functions save the tensor itself. And compiled code would have to
be traced through it: once there is any, no output is pending.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nano_loop.kernels.norm import norm_arguments
from nano_loop.kernels.norm.norm_activation import (
    HARDSWISH,
    SILU,
    Activation,
    Bypassed,
    NormActivation,
    Normalized,
    Sum,
)
from nano_loop.patching.attributes import replaced
from nano_loop.patching.calls.exports import is_exporting
from nano_loop.patching.torch_private import (
    READING_IN_CPP,
    below_subclasses,
    calls_only_forward,
    has_global_module_hooks,
    in_functorch,
    in_mode,
)
from nano_loop.patching.torch_private_autograd import has_saved_tensor_hooks, in_forward_mode
from nano_loop.patching.torch_private_compiler import has_compiled_code

#: The activations that may read a pending output, and whether they change it.
_ACTIVATIONS: Mapping[Any, bool] = {
    **dict.fromkeys((F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.silu, F.hardswish), False),
    **dict.fromkeys((torch.relu, Tensor.relu), False),
    **dict.fromkeys((torch.relu_, Tensor.relu_), True),
}
_SMOOTH = {F.silu: SILU, F.hardswish: HARDSWISH}
_OPTIONS = frozenset(("inplace", "negative_slope", "min_val", "max_val"))
#: The sums, likewise.
_SUMS: Mapping[Any, bool] = {torch.add: False, Tensor.add: False, Tensor.add_: True}


class NormWithActivation:
    """What is around the calls of one norm's module.

    Attributes
    ----------
    expects_sum : bool
        Whether its outputs have gone to a sum before a ReLU.
    """

    def __init__(self) -> None:
        self.expects_sum = False
        self._is_known = self._is_given_up = False

    def __call__(self, function: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call the module, in a place of `CallInterceptor.around_modules`."""
        if self._is_given_up or kwargs or len(args) != 1 or not _is_supported(module, args[0]):
            return function(module, *args, **kwargs)
        call = NormCall(args[0], self, is_deferred=self._is_known)
        before, _state.call = _state.call, call
        try:
            output = function(module, *args)
        finally:
            _state.call = before
        return call.hand_over(output)

    def learn(self, *, has_sum: bool) -> None:
        """Note that an activation has read an output, or the sum of one and another tensor."""
        self.expects_sum, self._is_known = has_sum, True

    def give_up(self) -> None:
        """Note that something else has."""
        self._is_given_up = True


class NormCall:
    """A call of a norm, and what has become of its output.

    Parameters
    ----------
    x : torch.Tensor
        The input.
    norm : NormWithActivation
        What is around its module.
    is_deferred : bool
        Whether the elements of the output are left to what reads it. If not, its first reader is noted.
    has_sum : bool
        Whether the output is the sum of the norm's and of another tensor.
    bypassed : Bypassed, optional
        The outputs that the sum has been computed from.
    """

    def __init__(
        self,
        x: Tensor,
        norm: NormWithActivation,
        *,
        is_deferred: bool,
        has_sum: bool = False,
        bypassed: Bypassed | None = None,
    ) -> None:
        self.x, self.norm, self.is_deferred, self.has_sum = x, norm, is_deferred, has_sum
        self._bypassed = Bypassed() if bypassed is None else bypassed
        self._normalized: Normalized | None = None
        self._out: Tensor | None = None
        self._versions: list[int] = []

    def note(self, normalized: Normalized, out: Tensor) -> None:
        """Note what the output is computed from, and the tensor for it."""
        self._normalized, self._out, self._versions = normalized, out, normalized.versions()

    def hand_over(self, output: Any) -> Any:
        """Return an output: a pending one where it can be, or else a written one."""
        out, self._out = self._out, None  # it would keep itself alive
        is_left = out is not None or not self.is_deferred
        if is_left and (out is None or output is out) and type(output) is Tensor and output.requires_grad:
            return PendingOutput.of(output, self)
        if out is not None:
            self._unchanged().write(out)
        return output

    def activated(self, pending: PendingOutput, activation: Activation, in_place: bool) -> Tensor | None:
        """Return the activation of a pending output. None: it is written."""
        if not self.is_deferred:
            self.norm.learn(has_sum=self.has_sum)
            pending.as_plain()
            return None
        normalized = self._unchanged()
        output = self._read(pending, in_place)
        return _apply(NormActivation, activation, self._bypassed, in_place, output, *normalized)

    def sum_of(self, pending: PendingOutput, other: Tensor, in_place: bool) -> Tensor | None:
        """Return the sum of a pending output and another tensor, which is pending, too. None: it is not deferred."""
        if not self.is_deferred or not self.norm.expects_sum or self.has_sum:
            return None
        normalized = self._unchanged()._replace(added=other)
        total: Tensor = self._continued(_apply(Sum, self._read(pending, in_place), other, in_place), normalized)
        return total

    def watched(self, total: Any) -> Any:
        """Return a sum of the output as one whose first reader is noted, too."""
        return total if self.is_deferred or self.has_sum else self._continued(total)

    def settle(self, out: Tensor) -> None:
        """Write the output, as something else reads it."""
        if self.is_deferred:
            self._unchanged().write(out)
        self._bypassed.is_used = True

    def _continued(self, total: Any, normalized: Normalized | None = None) -> Any:
        call = NormCall(self.x, self.norm, is_deferred=self.is_deferred, has_sum=True, bypassed=self._bypassed)
        if normalized is not None:
            call.note(normalized, total)
        return call.hand_over(total)

    def _read(self, pending: PendingOutput, in_place: bool) -> Tensor:
        if in_place:
            return pending.as_plain()
        self._bypassed.add(pending)
        return pending

    def _unchanged(self) -> Normalized:
        assert self._normalized is not None
        self._normalized.refuse_changes(self._versions)
        return self._normalized


class _State(threading.local):
    """What this thread's norms are doing.

    Attributes
    ----------
    call : NormCall or None
        The call of a module that the thread is in.
    unwritten : list of weakref.ref
        The pending outputs whose elements are not written.
    """

    def __init__(self) -> None:
        self.call: NormCall | None = None
        self.unwritten: list[weakref.ref[PendingOutput]] = []


_state = _State()


def requested(x: Tensor) -> NormCall | None:
    """Return the call with this input to which a norm leaves the writing of its output, or None."""
    call = _state.call
    return call if call is not None and call.is_deferred and call.x is x else None


@contextmanager
def all_written() -> Iterator[None]:
    """Let what C++ code reads find no tensor whose elements are not written, in the body."""

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _state.unwritten:
                _settle_all()
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in READING_IN_CPP:
            stack.enter_context(replaced(owner, name, calling))
        yield


def _settle_all() -> None:
    """Write the pending outputs of this thread."""
    unwritten, _state.unwritten = _state.unwritten, []
    for reference in unwritten:
        if isinstance(pending := reference(), PendingOutput):
            pending.settle()


class PendingOutput(Tensor):
    """The output of a norm, or a sum of one, that nothing has read yet."""

    _call: NormCall

    @classmethod
    def of(cls, output: Any, call: NormCall) -> PendingOutput:
        """Make a plain tensor a pending output."""
        output._call, output.__class__ = call, cls
        pending: PendingOutput = output
        if call.is_deferred:
            unwritten = [reference for reference in _state.unwritten if isinstance(reference(), cls)]
            _state.unwritten = [*unwritten, weakref.ref(pending)]
        return pending

    def as_plain(self) -> Tensor:
        """Make this a plain tensor."""
        del self._call
        self.__class__ = Tensor  # type: ignore[assignment]
        return self

    def settle(self) -> None:
        """Write this, and make it a plain tensor; the module's next outputs are written at once."""
        call = self._call
        call.settle(self.as_plain())
        call.norm.give_up()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch: that computes the norm's output, or takes it as a plain tensor."""
        kwargs = kwargs or {}
        with below_subclasses():
            if func in _ACTIVATIONS and len(args) == 1 and kwargs.keys() <= _OPTIONS:
                result = _activated(func, args[0], **kwargs)
            elif func in _SUMS and len(args) == 2 and not kwargs:
                result = _sum(func, *args)
            else:
                result = None
            if result is not None:
                return result
            for pending in _pending_in((args, kwargs)):
                pending.settle()
        return func(*args, **kwargs)


def _activated(
    func: Any,
    pending: PendingOutput,
    inplace: bool = False,
    negative_slope: float = 0.0,
    min_val: float = 0.0,
    max_val: float = math.nan,
) -> Tensor | None:
    """Return the activation of a pending output, or None if that is to be written before. torch names all arguments."""
    if min_val != 0 or negative_slope < 0 or max_val <= 0:
        return None
    if func not in _SMOOTH:
        ceiling = torch.tensor(6.0 if func is F.relu6 else max_val, dtype=pending.dtype, device="cpu")
        activation = Activation.relu(negative_slope, ceiling.item())
    elif pending._call.has_sum:
        return None
    else:
        activation = _SMOOTH[func]
    return pending._call.activated(pending, activation, _ACTIVATIONS[func] or inplace)


def _sum(func: Any, first: Any, second: Any) -> Tensor | None:
    """Return the sum of a pending output and of another tensor, or None if all are to be written before."""
    in_place = _SUMS[func]
    pending, other = (first, second) if in_place or isinstance(first, PendingOutput) else (second, first)
    if isinstance(other, PendingOutput) and other is not pending:
        other.settle()
    if not isinstance(pending, PendingOutput) or not _can_be_added(other, pending):
        return None
    call = pending._call
    total = call.sum_of(pending, other, in_place)
    if total is None and not call.is_deferred:
        total = call.watched(func(pending.as_plain(), other))
    return total


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _can_be_added(other: Any, pending: Tensor) -> bool:
    if type(other) is not Tensor or other.layout is not torch.strided or not other.is_cpu:
        return False
    return other.dtype is pending.dtype and other.shape == pending.shape and other.stride() == pending.stride()


def _pending_in(value: Any) -> Iterable[PendingOutput]:
    if isinstance(value, PendingOutput):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _pending_in(part)
    elif isinstance(value, dict):
        yield from _pending_in([*value.values()])


def _is_supported(module: nn.Module, x: Any) -> bool:
    """Whether a module's output may be pending: nothing but its readers sees it, and torch records a plain graph."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.numel() >= norm_arguments.MIN_ELEMENTS
        and torch.is_grad_enabled()
        and calls_only_forward(module)
        and not has_global_module_hooks()
        and not (in_functorch() or in_mode() or in_forward_mode() or is_exporting())
        # An activation checkpoint demands that the forward and its repetition save the same tensors.
        and not has_saved_tensor_hooks()
        and not has_compiled_code()
    )
