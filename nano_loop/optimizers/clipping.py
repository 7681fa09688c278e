"""Clipping of gradients in C: one pass for their norm, and one that scales them where the norm is too large.

torch calls two operators for each gradient and four for the norm of their norms, and multiplies by 1 where there is
nothing to clip. Of a table, only the rows that have a gradient are read (see `nano_loop.kernels.embedding`). What is
unusual is left to torch: another norm, gradients of several dtypes or that are not plain dense tensors, a norm that is
not finite, modes, a profiler that runs, `torch.compile`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from nano_loop.kernels.embedding.row_gradient import RowGradient, row_gradient_of
from nano_loop.kernels.gradient_clipping import KERNEL, gradients_in_memory
from nano_loop.optimizers.covered_parameters import are_covered, covered
from nano_loop.patching.objects.gradients import gradient_of, on_read
from nano_loop.patching.torch_private import in_functorch, in_mode
from nano_loop.patching.torch_private_autograd import in_forward_mode
from nano_loop.patching.torch_private_optimizers import is_profiling, replaced_inside_no_grad

_Function = Callable[..., Any]

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_PLAIN = frozenset((nn.Parameter, Tensor))
_LEAST = 1 << 17  # numbers of which torch clips values as fast
_LARGEST = 1e38  # limit of numbers that fp32 and bf16 have, besides infinity
_BYTES = 8  # of an address
_SCALED = 2  # what the functions for norms return if they have changed gradients


@contextmanager
def clipped_in_c(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let torch's `clip_grad_norm_` and `clip_grad_value_` clip the gradients of such parameters by functions in C.

    It does not matter when the two were imported. The parameters are held weakly.
    """
    with ExitStack() as changes:
        changes.enter_context(replaced_inside_no_grad(clip_grad_norm_, _clip_norm))
        changes.enter_context(replaced_inside_no_grad(clip_grad_value_, _clip_value))
        changes.enter_context(covered(parameters))
        del parameters
        yield


def _clip_norm(original: _Function) -> _Function:
    """Return the replacement of what is inside ``clip_grad_norm_``."""

    @functools.wraps(original)
    def clip(
        parameters: Any,
        max_norm: Any,
        norm_type: Any = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        listed = _listed(parameters)
        is_usual = foreach is not False and _is_number(norm_type) and norm_type == 2 and _is_number(max_norm)
        gradients = _gathered(listed, max_norm >= 0) if is_usual else None
        if gradients is not None:
            norm = torch.empty((), dtype=gradients.dtype, device="cpu")
            result = gradients.call("clip_norm", float(max_norm), norm)
            if result == _SCALED:
                gradients.note_change()
            if result:
                return norm
        return original(listed or parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    return clip


def _clip_value(original: _Function) -> _Function:
    """Return the replacement of what is inside ``clip_grad_value_``."""

    @functools.wraps(original)
    def clip(parameters: Any, clip_value: Any, foreach: bool | None = None) -> Any:
        listed = _listed(parameters)
        is_usual = foreach is not False and _is_number(clip_value) and abs(clip_value) < _LARGEST
        is_large = is_usual and are_covered(listed) and sum(parameter.numel() for parameter in listed) >= _LEAST
        gradients = _gathered(listed, clip_value >= 0) if is_large else None
        if gradients is None:
            return original(listed or parameters, clip_value, foreach)
        gradients.call("clip_value", float(clip_value))
        gradients.note_change()
        return None

    return clip


class _Gradients(NamedTuple):
    """Gradients that the functions in C take.

    Attributes
    ----------
    tensors : list of torch.Tensor
        The gradients.
    memory : bytes
        Where they are.
    by_rows : list of RowGradient
        Those of which only some rows are read and changed.
    observed : list of callable
        What is to be called when others are changed.
    """

    tensors: list[Tensor]
    memory: bytes
    by_rows: list[RowGradient]
    observed: list[Callable[[], None]]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function in C, and return its result."""
        length = len(self.memory) // _BYTES
        return KERNEL(f"{function}_{_DTYPES[self.dtype]}", self.memory, length, *arguments)

    def note_change(self) -> None:
        """Let autograd, and who observes the gradients, know that they were changed."""
        increment_version(self.tensors)
        for rows in self.by_rows:
            rows.know_change()
        for note in self.observed:
            note()


def _gathered(parameters: Sequence[Any], keeps_zeros: bool) -> _Gradients | None:
    """Return the gradients of parameters, or None where torch has to clip them.

    Zeros stay what they are where `keeps_zeros`, so that rows of tables without a gradient may be left out.
    """
    if not are_covered(parameters) or in_mode() or in_functorch() or in_forward_mode() or is_profiling():
        return None
    if not _PLAIN.issuperset(map(type, parameters)):
        return None
    tensors = [gradient for parameter in parameters if (gradient := gradient_of(parameter)) is not None]
    if {*map(type, tensors)} != {Tensor} or tensors[0].dtype not in _DTYPES or KERNEL.unavailable is not None:
        return None
    whole, tables, by_rows, observed = tensors, [], [], []
    if on_read:
        for parameter in parameters:
            gradient, rows = gradient_of(parameter), row_gradient_of(parameter)
            if gradient is None:
                continue
            if rows is not None and keeps_zeros and rows.is_in(gradient):
                whole = [tensor for tensor in whole if tensor is not gradient]
                tables.append((gradient, *rows.listed))
                by_rows.append(rows)
            elif id(parameter) in on_read:
                observed.append(on_read[id(parameter)])
    memory = gradients_in_memory(whole, tables)
    return None if memory is None else _Gradients(tensors, memory, by_rows, observed)


def _listed(parameters: Any) -> list[Any]:
    """Return parameters in a list, since they may be in an iterator, or one of them."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not math.isnan(value)
