"""Computes the final activation of a model in fp32: the sigmoid, softmax or exp whose result the model returns.

bf16 has 8 bits of precision, so sigmoid(6.3) is 1, and `BCELoss` clamps its logarithm: the loss stays at 50, without a
gradient. Casting the output to fp32 does not help, since it is already rounded. Computing every sigmoid and softmax in
fp32 would help, as CUDA's autocast does for softmax, but gates and attention would then pass fp32 to all later layers.

So each of these operators records its input during the call into the model. If the model returns the result, or a view
of it, the operator runs again on that input in fp32, and the bf16 result is not used. So that gradients stay those of
the program, the bf16 result is used if it has hooks, or if a custom autograd function has returned the view.
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
from nano_loop.patching.operators import overridden_together
from nano_loop.patching.torch_private import below_autocast, in_functorch, version
from nano_loop.patching.torch_private_autograd import is_seen_by_program
from nano_loop.precision.autocast.autocast import LOW_DTYPES, to_fp32
from nano_loop.precision.autocast.default_ops import overload_of

#: Operators whose results are close to a bound or span many powers of two, so that 8 bits are too few, and operators
#: that are applied to their results: `softmax(x).log()`, `sigmoid(x).clamp(1e-7)`, `1 - sigmoid(x)`. `clamp_min` is
#: omitted, since every `relu` calls it and recording costs 15 µs.
_OPERATORS = (
    *("sigmoid", "tanh", "softmax.int", "log_softmax.int", "log_sigmoid", "exp"),
    *("log", "clamp", "clamp_max", "rsub.Scalar"),
)
#: Maximum number of input elements that are kept per call (64 MiB), and of operators. The last one is always kept.
MOST_ELEMENTS, MOST_OPERATORS = 1 << 25, 128


class _Noted(NamedTuple):
    """A call of an operator in bf16 or fp16, with the version counters that show later writes to its tensors."""

    operator: Any
    input: Tensor
    others: tuple[Any, ...]
    result: Tensor
    versions: tuple[int, int]
    differentiable: bool

    def still_holds(self) -> bool:
        """Whether no tensor was written to or got another history, as the output of a custom autograd function."""
        if self.differentiable != self.result.requires_grad:
            return False
        if self.result.is_inference():  # inference tensors have no version counter
            return torch.equal(self.result, self.operator(self.input, *self.others))
        return self.versions == (version(self.input), version(self.result))


class Activations:
    """The activations in a call into a model."""

    __slots__ = ("_elements", "_noted")

    def __init__(self) -> None:
        self._noted: deque[_Noted] = deque()
        self._elements = 0

    def note(self, operator: Any, input: Tensor, others: tuple[Any, ...], result: Tensor) -> None:
        """Record a call of an operator. This must be fast, since it runs for each one."""
        versions = version(input), version(result)
        self._noted.append(_Noted(operator, input, others, result, versions, result.requires_grad))
        self._elements += input.numel()
        while len(self._noted) > 1 and (self._elements > MOST_ELEMENTS or len(self._noted) > MOST_OPERATORS):
            self._elements -= self._noted.popleft().input.numel()

    def in_fp32(self, output: Tensor) -> Tensor:
        """Return an output of the model in fp32: recomputed if it is the result of an activation, otherwise cast."""
        noted = self._call_that_computed(output) if self._noted else None
        if noted is None:
            return to_fp32(output)
        with torch.set_grad_enabled(output.requires_grad):
            others = [torch.float32 if other in LOW_DTYPES else other for other in noted.others]  # a dtype argument
            whole = noted.operator(self.in_fp32(noted.input), *others)
            return _same_view(output, noted.result, whole)

    def _call_that_computed(self, tensor: Tensor) -> _Noted | None:
        """Return the call whose result is `tensor` or its base."""
        if not _is_plain_low(tensor) or in_functorch():
            return None
        for noted in reversed(self._noted):
            if _is_plain_low(noted.result) and shares_memory(noted.result, tensor):
                connected = noted.differentiable or not tensor.requires_grad
                is_replaceable = connected and noted.still_holds() and not is_seen_by_program(tensor, noted.result)
                return noted if is_replaceable else None
        return None


def _is_plain_low(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.dtype in LOW_DTYPES and tensor.layout is torch.strided


def _same_view(view: Tensor, result: Tensor, computed: Tensor) -> Tensor:
    """Return a view of `computed` that corresponds to `view` of `result`."""
    if view is result:
        return computed
    if view.is_contiguous() and result.is_contiguous() and view.numel() == computed.numel():
        return computed.view(view.shape)
    return computed.as_strided(view.size(), view.stride(), view.storage_offset())


class _Noting(threading.local):
    """The activations of this thread's current call, and the encoder's last layer and its `padding`, each or None."""

    activations: Activations | None = None
    padding: tuple[Any, Tensor] | None = None


noting = _Noting()


def activations_noticed() -> AbstractContextManager[None]:
    """Record operators in `noting.activations` of their thread until the last user of this context exits."""
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
