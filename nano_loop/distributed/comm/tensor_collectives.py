"""Collectives of single tensors, which wait in Python, so that Ctrl-C and failed ranks end them."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoConfigError, error_message, shown

_NAMES = ("mean", "avg", "sum", "product", "min", "max", "band", "bor", "bxor")


def check_arguments(group: Any = None, reduce_op: Any = "sum") -> None:
    """Raise a `NanoConfigError` if the group or the operation of a collective is not supported."""
    none = group is None or group is distributed.GroupMember.NON_GROUP_MEMBER  # a group of other ranks
    if not none and not isinstance(group, distributed.ProcessGroup):
        hint = 'Pass an operation by its name: reduce_op="sum"'
        raise NanoConfigError(error_message(shown("group", group), "it must be a process group or None", hint))
    is_name = isinstance(reduce_op, str) and reduce_op.lower() in _NAMES
    if not (is_name or isinstance(reduce_op, (distributed.ReduceOp, distributed.ReduceOp.RedOpType))):
        expected = f"it must be one of torch.distributed.ReduceOp, or of {', '.join(_NAMES)}"
        raise NanoConfigError(error_message(shown("reduce_op", reduce_op), expected, 'Pass reduce_op="sum"'))


def reduced(ranks: Ranks, tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
    """Reduce `tensor` in place over all ranks and return it; without a process group, return it unchanged."""
    if not distributed.is_initialized():
        return tensor
    named = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    mean = named in ("mean", "avg")
    operation = getattr(distributed.ReduceOp, "SUM" if mean else named.upper()) if isinstance(named, str) else named
    size = distributed.get_world_size(group)
    is_floating = tensor.is_floating_point() or tensor.is_complex()
    split = ranks.context.split
    if mean and split is not None and is_floating and size == ranks.size and split.weight != 1:
        with torch.no_grad():
            tensor.mul_(split.weight)
    ranks.finish(distributed.all_reduce(tensor, operation, group, async_op=True))
    if mean:
        with torch.no_grad():  # averaging losses for a log must not change their gradients
            if is_floating:
                tensor.copy_(tensor / size)
            else:
                tensor.div_(size, rounding_mode="trunc")  # division in float32 is not exact
    return tensor


def gathered(ranks: Ranks, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
    """Return the tensors of all ranks, stacked along a new first dimension; without a process group, `tensor`."""
    if not distributed.is_initialized():
        return tensor
    if sync_grads:
        from torch.distributed.nn.functional import all_gather  # as Fabric does; slow to import

        return torch.stack(all_gather(tensor.contiguous(), group))  # type: ignore[no-untyped-call]
    tensor = tensor.detach().contiguous()
    tensors = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(group))]
    ranks.finish(distributed.all_gather(tensors, tensor, group, async_op=True))
    return torch.stack(tensors)
