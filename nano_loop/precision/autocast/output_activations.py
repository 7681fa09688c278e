"""Computes the last activation of a model in fp32: the sigmoid, softmax or exp whose result the model returns.

bf16 has 8 bits, so the sigmoid of 6.3 is 1, and `BCELoss` clamps its logarithm: the loss stays at 50, and no gradient
flows. Casting the output to fp32 does not help, since it was rounded before. Computing every sigmoid and softmax in
fp32 would, as CUDA's autocast does for softmax, but gates and attention would then pass fp32 on to all that follows.

So each of these operators notes its input, as long as the call into the model lasts. Where the model returns the
result, or a view of it, the operator runs again on that input in fp32. The bf16 result is then not used.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.patching.nested_tensors import shares_memory
from nano_loop.patching.operators.operators import overridden_together
from nano_loop.patching.torch_private import below_autocast, in_functorch, version
from nano_loop.precision.autocast.autocast import LOW_DTYPES, to_fp32
from nano_loop.precision.autocast.default_ops import overload_of

#: Operators whose results crowd near a bound or span many powers of two, where 8 bits are too few, and what is computed
#: with their results before they are returned: `softmax(x).log()`, `sigmoid(x).clamp(1e-7)`, `1 - sigmoid(x)`. Not
#: `clamp_min`, which every `relu` calls: noticing costs it 15 µs.
_OPERATORS = (
    *("sigmoid", "tanh", "softmax.int", "log_softmax.int", "log_sigmoid", "exp"),
    *("log", "clamp", "clamp_max", "rsub.Scalar"),
)
#: How many elements of inputs are kept for a call (64 MiB), and of how many operators. The last is kept in any case.
MOST_ELEMENTS, MOST_OPERATORS = 1 << 25, 128


class _Noted(NamedTuple):
    """One call of an operator in bf16 or fp16, with what shows later whether its tensors were written to."""

    operator: Any
    input: Tensor
    others: tuple[Any, ...]
    result: Tensor
    versions: tuple[int, int]
    differentiable: bool

    def still_holds(self) -> bool:
        """Whether no tensor was written to, nor got another history, as the output of a custom autograd function."""
        if self.differentiable != self.result.requires_grad:
            return False
        if self.result.is_inference():  # these have no version counter
            return torch.equal(self.result, self.operator(self.input, *self.others))
        return self.versions == (version(self.input), version(self.result))


class Activations:
    """The activations of one call into a model."""

    __slots__ = ("_elements", "_noted")

    def __init__(self) -> None:
        self._noted: deque[_Noted] = deque()
        self._elements = 0

    def note(self, operator: Any, input: Tensor, others: tuple[Any, ...], result: Tensor) -> None:
        """Note a call of an operator. It is made for each of them, so it is short."""
        versions = version(input), version(result)
        self._noted.append(_Noted(operator, input, others, result, versions, result.requires_grad))
        self._elements += input.numel()
        while len(self._noted) > 1 and (self._elements > MOST_ELEMENTS or len(self._noted) > MOST_OPERATORS):
            self._elements -= self._noted.popleft().input.numel()

    def in_fp32(self, output: Tensor) -> Tensor:
        """Return an output of the model in fp32: computed so if it is the result of an activation, else cast."""
        noted = self._call_that_computed(output) if self._noted else None
        if noted is None:
            return to_fp32(output)
        with torch.set_grad_enabled(output.requires_grad):
            others = [torch.float32 if other in LOW_DTYPES else other for other in noted.others]  # a dtype to return
            whole = noted.operator(self.in_fp32(noted.input), *others)
            return _same_view(output, noted.result, whole)

    def _call_that_computed(self, tensor: Tensor) -> _Noted | None:
        """Return the call whose result is `tensor`, or of which it is a view."""
        if not _is_plain_low(tensor) or in_functorch():
            return None
        for noted in reversed(self._noted):
            if _is_plain_low(noted.result) and shares_memory(noted.result, tensor):
                connected = noted.differentiable or not tensor.requires_grad
                return noted if connected and noted.still_holds() else None
        return None


def _is_plain_low(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.dtype in LOW_DTYPES and tensor.layout is torch.strided


def _same_view(view: Tensor, result: Tensor, computed: Tensor) -> Tensor:
    """Return the view of `computed` that `view` is of `result`."""
    if view is result:
        return computed
    if view.is_contiguous() and result.is_contiguous() and view.numel() == computed.numel():
        return computed.view(view.shape)
    return computed.as_strided(view.size(), view.stride(), view.storage_offset())


class _Noting(threading.local):
    """The activations of the call that this thread is in, or None."""

    activations: Activations | None = None


noting = _Noting()


def activations_noticed() -> AbstractContextManager[None]:
    """Let operators be noted in `noting.activations` of their thread, until the last user of this context exits."""
    return overridden_together("activations", lambda: {name: _noticing(name) for name in _OPERATORS}, "AutocastCPU")


@functools.cache
def _noticing(name: str) -> Callable[..., Any]:
    operator = overload_of(name)

    def noticing(keys: torch.DispatchKeySet, input: Tensor, *others: Any, **named: Any) -> Any:
        with below_autocast():
            result = operator(input, *others, **named)
        activations = noting.activations
        if activations is not None and result.dtype in LOW_DTYPES and not named:
            activations.note(operator, input, others, result)
        return result

    return noticing
