"""The operators that combine samples, the rows of a tensor: one table for calls and for nodes of autograd.

A loop may begin to mix samples after the first step. An autograd graph shows this by its nodes. Inputs have no graph:
``0.5 * x + 0.5 * x.flip(0)`` is known from the call only. A node has the name of its operator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from nano_loop.distributed.comm.ranks import RunContext
from nano_loop.distributed.data_parallel.random_draws import is_of_parameter
from nano_loop.patching.operators import Kernel, kernel, overridden_together
from nano_loop.patching.patch_table import listening, value_in_force
from nano_loop.patching.torch_private import arguments_of
from nano_loop.patching.torch_private_autograd import (
    dimensions_of,
    in_backward,
    input_shape,
    is_selected_by_mask,
    output_numel,
)

#: Operators that combine elements along dimensions, in calls and in graphs.
_CALLED = (
    *("flip", "roll", "sort.stable", "topk", "kthvalue", "median", "median.dim", "mode", "cumsum", "cumprod"),
    *("std.correction", "var.correction", "gather", "bincount", "index.Tensor", "index_select"),
)
#: Likewise, in graphs only: many loops call them in each step without one, such as `max` for an accuracy.
_IN_GRAPHS = (
    *("max", "min", "amax", "amin", "aminmax", "nanmedian", "std_mean", "var_mean", "norm", "linalg_vector_norm"),
    *("cummax", "cummin", "logcumsumexp", "prod", "logsumexp", "softmax", "log_softmax"),
    *("index_put", "index_add", "index_copy", "index_fill", "index_reduce"),
    *("mm", "bmm", "cdist", "euclidean_dist", "pdist"),
)
#: Those of them that often act on rows that are no samples, such as words.
_OF_OTHER_ROWS = ("gather", "prod", "logsumexp", "softmax", "log_softmax")


def _node_name(operator: str) -> str:
    """Return the name of an operator's nodes without their number, by torch's own rule, as for `derivatives.yaml`."""
    return "".join(map(str.title, operator.partition(".")[0].split("_"))) + "Backward"


_NODES = frozenset(map(_node_name, [*_CALLED, *_IN_GRAPHS]))
_NODES_OF_OTHER_ROWS = frozenset(map(_node_name, _OF_OTHER_ROWS))
_ADDING = frozenset(map(_node_name, ("sum", "mean")))


def combines(node: Any, samples: int) -> bool:
    """Whether an operator in a graph may combine samples: it does not act within the rows of this number of samples."""
    name = node.name().rstrip("0123456789")
    if name not in _NODES or is_selected_by_mask(node):
        return False
    if (dimensions := dimensions_of(node)) and input_shape(node)[:1] == (samples,):
        return 0 in dimensions
    return name not in _NODES_OF_OTHER_ROWS


def adds_samples(node: Any, samples: int) -> bool:
    """Whether a node is the sum or the mean of this number of samples, but no scalar."""
    is_along_first = input_shape(node)[:1] == (samples,) and 0 in dimensions_of(node)
    return is_along_first and node.name().rstrip("0123456789") in _ADDING and output_numel(node, 0) > 1


def call_combines(operator: str, samples: int, *args: Any, **kwargs: Any) -> bool:
    """Whether a call of an operator, with these arguments, combines the rows of a tensor with this number of rows."""
    defaults = _defaults(operator)
    values: dict[str, Any] = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    if operator == "cat":
        return _changes_order(samples, values["tensors"], values["dim"])
    rows, along = values["self"], values.get("dim", values.get("dims"))
    dimensions = [along] if isinstance(along, int) else along or [0]  # without any, the tensor counts as a vector
    if rows.dim() == 0 or len(rows) != samples or is_of_parameter(rows):
        return False
    if all(one % rows.dim() for one in dimensions):
        return False
    return not operator.startswith("index") or _is_other_order(
        samples, *values.get("indices", [values.get("index")])[:1]
    )


@functools.cache
def _defaults(operator: str) -> dict[str, Any]:
    """Return the arguments of an operator with their defaults, which a call omits; None if there is none."""
    name, _, overload = operator.partition(".")
    arguments = arguments_of(getattr(getattr(torch.ops.aten, name), overload or "default"))
    return {one.name: one.default_value for one in arguments}


def _is_other_order(samples: int, index: Tensor | None) -> bool:
    """Whether an index changes the order of the rows, or repeats some; it may also select some of them."""
    if index is None or index.shape != (samples,) or index.dtype in (torch.bool, torch.uint8):
        return False
    return bool(index.tolist() != [*range(samples)])


def _changes_order(samples: int, tensors: Sequence[Tensor], dim: int) -> bool:
    """Whether slices of one tensor are put together in another order, as by ``torch.cat([x[1:], x[:1]])``."""
    if len(tensors) < 2 or not all(one.dim() for one in tensors):
        return False
    if dim % tensors[0].dim() or sum(map(len, tensors)) != samples:
        return False
    offsets = [one.storage_offset() for one in tensors]
    return len({one.untyped_storage().data_ptr() for one in tensors}) == 1 and offsets != sorted(offsets)


@contextmanager
def calls_noted(context: RunContext, note: Callable[..., None]) -> Iterator[None]:
    """In the body, call ``note(samples, operator, frame, *args, **kwargs)`` before calls by the run's loop.

    Sums and means are not noted: many loops compute them for their logs.
    """

    def listener(*call: Any, **kwargs: Any) -> None:
        share = context.divided
        is_evaluation = context.sharding.whole and not torch.is_grad_enabled()  # of whole batches
        if share is not None and not is_evaluation and not in_backward():
            note(share.samples, *call, **kwargs)

    with overridden_together("operators that combine", _functions, "CPU"), listening(calls_noted, listener):
        yield


def _functions() -> dict[str, Callable[..., Any]]:
    return {operator: _noting(operator, kernel(operator, "CPU")) for operator in (*_CALLED, "cat")}


def _noting(operator: str, original: Kernel) -> Callable[..., Any]:
    def call(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        for listener in value_in_force(calls_noted) or ():
            listener(operator, _caller(sys._getframe(1)), *args, **kwargs)
        return original(keys, *args, **kwargs)

    return call


def _caller(frame: FrameType) -> FrameType:
    """Return the frame that called a function of torch, through its modes."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame
