"""Collectives of single tensors, which wait in Python, so that Ctrl-C and a rank that has failed end them."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from nano_loop.distributed.comm.ranks import Ranks


def reduced(ranks: Ranks, tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
    """Reduce `tensor` in place over all ranks, and return it; without a process group, as it is."""
    if not distributed.is_initialized():
        return tensor
    mean = reduce_op in ("mean", "avg")
    named = distributed.ReduceOp.SUM if mean else reduce_op
    operation = getattr(distributed.ReduceOp, named.upper()) if isinstance(named, str) else named
    ranks.finish(distributed.all_reduce(tensor, operation, group, async_op=True))
    if mean:
        with torch.no_grad():  # the mean of losses, for a log, leaves each loss's own gradient as it is
            tensor.copy_(tensor / distributed.get_world_size(group))
    return tensor


def gathered(ranks: Ranks, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
    """Return the tensors of all ranks, stacked along a new first dimension; without a process group, `tensor`."""
    if not distributed.is_initialized():
        return tensor
    if sync_grads:
        from torch.distributed.nn.functional import all_gather  # as Fabric does; its import takes a while

        return torch.stack(all_gather(tensor.contiguous(), group))  # type: ignore[no-untyped-call]
    tensor = tensor.detach().contiguous()
    tensors = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(group))]
    ranks.finish(distributed.all_gather(tensors, tensor, group, async_op=True))
    return torch.stack(tensors)
