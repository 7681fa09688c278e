"""Buffers that calls change by each rank's batch, such as codebooks and observers of quantisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nano_loop.distributed.data_parallel.initial_sync import Named, named_buffers
from nano_loop.patching.members import buffers_of

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def compared_buffers(models: Sequence[nn.Module]) -> list[Named]:
    """Return the buffers that are to be equal on all ranks.

    These are strided ones that a checkpoint holds: others are caches, which may have other shapes by rank. The running
    statistics of batch norm differ by design.
    """
    saved = {id(tensor) for model in models for tensor in nn.Module.state_dict(model, keep_vars=True).values()}
    of_norms = {
        id(buffer)
        for model in models
        for module in model.modules()
        if isinstance(module, _NORMS)
        for buffer in buffers_of(module, recurse=False)
    }
    return [
        (name, buffer)
        for name, buffer in named_buffers(models)
        if id(buffer) in saved - of_norms and buffer.layout is torch.strided and not buffer.is_quantized
    ]
