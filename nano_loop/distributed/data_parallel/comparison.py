"""Compares what ranks may have changed by themselves, and what they have computed, at some averagings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel import checksums
from nano_loop.distributed.data_parallel.gradients import AveragedGradients
from nano_loop.distributed.data_parallel.initial_sync import Named, named_buffers
from nano_loop.distributed.data_parallel.parameters import Parameters
from nano_loop.errors import RankLateError, RankLeftError, error_message
from nano_loop.patching.members import buffers_of
from nano_loop.patching.user_code import warn, warn_once

_BUFFER = "a call changes it by its rank's batch, and rank 0's is kept"
_MEAN = "Set it to nano_loop.all_reduce(value), the mean of all ranks, in the call"
_GAIN = "several processes gain nothing, and auto_lr leaves the rate at 1×"
_DIVIDE = (
    "Iterate a DataLoader in train mode, or one that setup_dataloaders(loader, shard=True) has set up, whose dataset "
    "returns the rows of the index. Or take other batches on each rank, such as "
    "x[nano_loop.global_rank()::nano_loop.world_size()]. Otherwise leave out num_processes"
)
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class Comparison:
    """Compares the parameters, the buffers and the work of the ranks at some averagings.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    is_enabled : bool
        Whether parameters and buffers are compared; see `checksums`.
    """

    def __init__(self, ranks: Ranks, is_enabled: bool) -> None:
        self._ranks = ranks
        self._is_enabled = is_enabled

    def after(self, averagings: int, parameters: Parameters) -> None:
        """Compare after an averaging, before which there have been so many. Collective.

        Raises
        ------
        NanoWorkerError
            If a parameter differs.
        """
        if not self._is_enabled or not checksums.is_due(averagings):
            return
        named = parameters.named
        checksums.refuse_unequal(self._gathered(named), named)
        if _BUFFER not in self._ranks.context.sharding.warnings_given:
            buffers = _compared_buffers(parameters.models)
            unequal = checksums.first_unequal(self._gathered(buffers), buffers)
            if unequal is not None:
                got = f"the buffer {unequal[0]} is no longer the same on all ranks"
                warn_once_a_run(self._ranks, error_message(got, _BUFFER, _MEAN), _BUFFER)

    def of_rest(self, parameters: Parameters, averaged: AveragedGradients) -> None:
        """Compare the parameters whose gradients were never averaged, as where `torch.autograd.grad` makes them.

        Collective. Nothing is compared where a rank has left the run, or leaves it later than within the timeout: it is
        busy with what only one rank does.

        Raises
        ------
        NanoWorkerError
            If a parameter differs.
        """
        rest = [pair for pair in parameters.named if pair[1].requires_grad and pair[1] not in averaged]
        if not rest or not self._is_enabled:
            return
        with suppress(RankLeftError, RankLateError):
            checksums.refuse_unequal(self._gathered(rest), rest)

    def of_work(self, gradients: Sequence[tuple[float, float]], averagings: int) -> None:
        """Note in ``ranks.context.sharding`` whether all ranks have computed the same; warn once if they go on to.

        Parameters
        ----------
        gradients : sequence of (float, float)
            The `checksums.gradient_checksum` of each rank.
        averagings : int
            How many averagings there have been; a few steps are nothing to warn of.
        """
        sharding = self._ranks.context.sharding
        if any(norm for _, norm in gradients):  # else the ranks have computed nothing
            sharding.undivided = all(checksums.are_equal(one, gradients[0], torch.float32) for one in gradients)
        if sharding.undivided and averagings >= checksums.FIRST and self._ranks.rank == 0:
            got = f"each of the {self._ranks.size} ranks computes the same batches"
            warn_once(error_message(got, _GAIN, _DIVIDE))

    def _gathered(self, named: Sequence[Named]) -> list[bytes]:
        """Return the checksums of all ranks."""
        return self._ranks.channel.gather(checksums.checksums([tensor for _, tensor in named]), AVERAGING)


def _compared_buffers(models: Sequence[nn.Module]) -> list[Named]:
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


def warn_once_a_run(ranks: Ranks, message: str, kind: str) -> None:
    """Warn on rank 0, of each kind once a run. Every rank knows then that the warning was given."""
    warnings_given = ranks.context.sharding.warnings_given
    if kind not in warnings_given:
        warnings_given.add(kind)
        if ranks.rank == 0:
            warn(message)
