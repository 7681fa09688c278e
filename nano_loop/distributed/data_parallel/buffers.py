"""Buffers that calls change by each rank's batch, such as codebooks and observers: compared, or made equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.checksums import are_equal, sum_and_norm
from nano_loop.distributed.data_parallel.initial_sync import Named, named_buffers
from nano_loop.errors import error_message
from nano_loop.patching.members import buffers_of

#: How buffers are made equal after each averaging; None: they are compared.
Sync = Literal["average", "rank0"] | None

_HINT = 'Pass sync_buffers="average", the mean of all ranks after each backward, or "rank0", the buffers of rank 0'
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def make_buffers_equal(ranks: Ranks, models: Sequence[nn.Module], sync: Sync) -> None:
    """Give all ranks the mean of their buffers, or those of rank 0, in place. Collective.

    Whole numbers and truth values have no mean: they become those of rank 0.
    """
    buffers = [buffer for _, buffer in _persistent(models)]
    if sync == "average":
        means = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        for buffer in means:
            buffer.detach().copy_(ranks.mean(buffer))
        buffers = [buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())]
    ranks.broadcast_tensors(buffers)


def message_of_unequal_buffer(ranks: Ranks, models: Sequence[nn.Module]) -> str | None:
    """Return the message of a warning if a buffer differs between the ranks; else None. Collective.

    The running statistics of batch norm, which differ by design, are not compared.
    """
    of_norms = {
        id(buffer)
        for model in models
        for module in model.modules()
        if isinstance(module, _NORMS)
        for buffer in buffers_of(module, recurse=False)
    }
    compared = [(name, buffer) for name, buffer in _persistent(models) if id(buffer) not in of_norms]
    gathered = ranks.gather([(name, *sum_and_norm(buffer)) for name, buffer in compared])
    for place, (name, buffer) in enumerate(compared):
        entries = [entries[place] if place < len(entries) else ("", 0.0, 0.0) for entries in gathered]
        if not all(entry[0] == name and are_equal(entry[1:], entries[0][1:], buffer.dtype) for entry in entries):
            got = f"the buffer {name} is no longer the same on all ranks"
            return error_message(got, "a call changes it by its rank's batch, and rank 0's is kept", _HINT)
    return None


def _persistent(models: Sequence[nn.Module]) -> Iterator[Named]:
    """Yield the strided buffers that a checkpoint holds: others are caches, which may have other shapes by rank."""
    saved = {id(tensor) for model in models for tensor in nn.Module.state_dict(model, keep_vars=True).values()}
    for name, buffer in named_buffers(models):
        if id(buffer) in saved and buffer.layout is torch.strided and not buffer.is_quantized:
            yield name, buffer
