"""Calls of torch's operators that combine the rows of a tensor, such as a flip, if ranks share each batch.

A loop may begin to mix samples after the first step, such as ``0.5 * x + 0.5 * x.flip(0)``. Inputs have no autograd
graph, so only the call shows this. Sums and means are not noted: many loops compute them for their logs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from nano_loop.distributed.comm.ranks import RunContext
from nano_loop.distributed.data_parallel.random_draws import is_of_parameter
from nano_loop.distributed.data_parallel.sample_weights import SampleWeights
from nano_loop.patching.operators import Kernel, kernel, overridden_together
from nano_loop.patching.patch_table import listening, value_in_force
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.patching.user_code import users_place

#: Libraries whose own calls combine no samples: packing a sequence sorts these, and nano_loop calls for itself.
_OWN = ("torch", "nano_loop")


@contextmanager
def combinations_noted(context: RunContext, weights: SampleWeights) -> Iterator[None]:
    """In the body, note calls by the loop that combine rows of this rank's share, with the line of the program.

    Until gradients are compared, all calls are noted: another number of samples may be the length of a table.

    Parameters
    ----------
    context : RunContext
        That of this rank's run.
    weights : SampleWeights
        Gets the operators and lines.
    """
    replacements = overridden_together("operators that combine", _functions, "CPU")
    with replacements, listening(combinations_noted, partial(_note, context, weights)):
        yield


def _functions() -> dict[str, Callable[..., Any]]:
    return {operator: _noting(operator, kernel(operator, "CPU")) for operator in _COMBINES}


def _noting(operator: str, original: Kernel) -> Callable[..., Any]:
    def call(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        for listener in value_in_force(combinations_noted) or ():
            listener(operator, sys._getframe(1), *args, **kwargs)
        return original(keys, *args, **kwargs)

    return call


def _note(
    context: RunContext, weights: SampleWeights, operator: str, caller: FrameType, *args: Any, **kwargs: Any
) -> None:
    share = context.divided
    is_evaluation = context.sharding.whole and not torch.is_grad_enabled()  # of whole batches
    if share is None or is_evaluation or in_backward():
        return
    if weights.was_compared and not _COMBINES[operator](share.samples, *args, **kwargs):
        return
    if str(caller.f_globals.get("__name__")).partition(".")[0] not in _OWN and (place := users_place()) is not None:
        line = f"{os.path.basename(place.filename)}:{place.number}"
        weights.note_operator(f"{operator.partition('.')[0]} in {line}")


def _acts_on_rows(samples: int, rows: Tensor, *dimensions: int) -> bool:
    """Whether an operator acts along the first dimension, and this has one row for each of these samples."""
    is_first = any(one % rows.dim() == 0 for one in dimensions) if rows.dim() else False
    return is_first and len(rows) == samples and not is_of_parameter(rows)


def _selects(samples: int, rows: Tensor, dim: int, index: Tensor) -> bool:
    """Whether an index changes the order of the rows, or repeats some; it may also select some of them."""
    is_index = index.dim() == 1 and len(index) == samples and index.dtype not in (torch.bool, torch.uint8)
    return is_index and _acts_on_rows(samples, rows, dim) and index.tolist() != [*range(samples)]


def _concatenates(samples: int, tensors: Sequence[Tensor], dim: int = 0) -> bool:
    """Whether slices of one tensor are put together in another order, as by ``torch.cat([x[1:], x[:1]])``."""
    if len(tensors) < 2 or not all(one.dim() for one in tensors):
        return False
    if dim % tensors[0].dim() or sum(map(len, tensors)) != samples:
        return False
    offsets = [one.storage_offset() for one in tensors]
    return len({one.untyped_storage().data_ptr() for one in tensors}) == 1 and offsets != sorted(offsets)


#: By operator, whether a call combines rows: its arguments are the number of samples, and the operator's.
_COMBINES: dict[str, Callable[..., bool]] = {
    "flip": lambda samples, rows, dims: _acts_on_rows(samples, rows, *dims),
    # Without dimensions, these treat a tensor as one vector.
    "roll": lambda samples, rows, shifts, dims=(): _acts_on_rows(samples, rows, *(dims or [0])),
    "cumsum": lambda samples, rows, dim, **options: _acts_on_rows(samples, rows, dim),
    "sort.stable": lambda samples, rows, *, dim=-1, **options: _acts_on_rows(samples, rows, dim),
    "gather": lambda samples, rows, dim, index, **options: _acts_on_rows(samples, rows, dim),
    "std.correction": lambda samples, rows, dim=None, **options: _acts_on_rows(samples, rows, *(dim or [0])),
    "var.correction": lambda samples, rows, dim=None, **options: _acts_on_rows(samples, rows, *(dim or [0])),
    "median": lambda samples, rows: _acts_on_rows(samples, rows, 0),
    "bincount": lambda samples, rows, *options, **more: _acts_on_rows(samples, rows, 0),
    "index_select": _selects,
    "index.Tensor": lambda samples, rows, indices: indices[0] is not None and _selects(samples, rows, 0, indices[0]),
    "cat": _concatenates,
}
