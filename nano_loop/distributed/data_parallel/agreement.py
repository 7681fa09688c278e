"""What ranks agree on before and after an averaging: that they are at the same place, with the same parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel import checksums
from nano_loop.distributed.data_parallel.fingerprint import NOTHING, Fingerprint, Purpose, refuse_divergence
from nano_loop.distributed.data_parallel.gradients import AveragedGradients, kind_of
from nano_loop.distributed.data_parallel.initial_sync import Named, make_equal, named_buffers
from nano_loop.distributed.data_parallel.overlap import NONE
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


class Agreement:
    """How far this rank is, which has to be as far as the others.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    parameters : Parameters
        What is averaged.
    compare : bool
        Whether the ranks compare their parameters and buffers from time to time; see `checksums`.

    Attributes
    ----------
    averagings, steps : int
        How many averagings there have been, and how many steps of optimizers.
    """

    def __init__(self, ranks: Ranks, parameters: Parameters, *, compare: bool) -> None:
        self._ranks = ranks
        self._parameters = parameters
        self._compares = compare
        self._buffers_differ = False  # which is warned of once
        self.averagings = 0
        self.steps = 0

    def exchange(self, purpose: Purpose, waiting: set[int], overlap: int = NONE) -> list[Fingerprint]:
        """Return the fingerprints of all ranks; raise a NanoError on each if they have diverged. Collective.

        Parameters
        ----------
        purpose : {"average", "sync"}
            What comes next.
        waiting : set of int
            The ids of the parameters whose gradients wait on this rank.
        overlap : int
            The state of `Overlap`.
        """
        compares_work = purpose == "average" and checksums.is_due(self.averagings)
        groups = [group for optimizer in self._parameters.optimizers for group in optimizer.param_groups]
        in_order = self._parameters.in_order
        own_fingerprint = Fingerprint(
            purpose,
            averagings=self.averagings,
            steps=self.steps,
            added_parameters=len(self._parameters.added_parameters),
            rates=tuple(_as_number(group.get("lr")) for group in groups),
            arrived=bytes([kind_of(parameter.grad) if id(parameter) in waiting else NOTHING for parameter in in_order]),
            gradients=checksums.gradient_checksum(in_order) if compares_work else (0.0, 0.0),
            overlap=overlap,
        )
        packed = self._ranks.channel.gather(own_fingerprint.pack(), AVERAGING)
        fingerprints = [Fingerprint.unpack(fingerprint) for fingerprint in packed]
        refuse_divergence(fingerprints)
        if compares_work:
            self._note_work([fingerprint.gradients for fingerprint in fingerprints])
        return fingerprints

    def sync_added_parameters(self) -> None:
        """Give parameters that the loop has added rank 0's values. Collective if there are any."""
        self._parameters.refresh()
        if self._parameters.added_parameters:
            self.exchange("sync", set())
            make_equal(self._ranks, self._parameters.added_parameters)
            self._parameters.are_equal()

    def end_averaging(self) -> None:
        """Note that gradients have been averaged, and compare parameters and buffers at some averagings. Collective.

        Raises
        ------
        NanoWorkerError
            If a parameter differs.
        """
        if self._compares and checksums.is_due(self.averagings):
            named = self._parameters.named
            checksums.refuse_unequal(self._gathered(named), named)
            self._compare_buffers()
        self.averagings += 1
        for function in self._ranks.context.after_averaging:
            function(self.averagings)

    def compare_rest(self, averaged: AveragedGradients) -> None:
        """Compare, at the end of the run, the parameters whose gradients were never averaged.

        `torch.autograd.grad` may have made them. Collective. Nothing is compared where a rank has left the run, or
        leaves it later than within the timeout: it is busy with what only one rank does.

        Raises
        ------
        NanoWorkerError
            If a parameter differs.
        """
        rest = [pair for pair in self._parameters.named if pair[1].requires_grad and pair[1] not in averaged]
        if rest and self._compares:
            with suppress(RankLeftError, RankLateError):
                checksums.refuse_unequal(self._gathered(rest), rest)

    def _compare_buffers(self) -> None:
        if self._buffers_differ:
            return
        buffers = _compared_buffers(self._parameters.models)
        unequal = checksums.first_unequal(self._gathered(buffers), buffers)
        self._buffers_differ = unequal is not None
        if unequal is not None and self._ranks.rank == 0:
            warn(error_message(f"the buffer {unequal[0]} is no longer the same on all ranks", _BUFFER, _MEAN))

    def _note_work(self, gradients: Sequence[tuple[float, float]]) -> None:
        """Note in ``ranks.context.sharding`` whether all ranks have computed the same; warn once if they go on to.

        `gradients` are the `checksums.gradient_checksum` of each rank.
        """
        sharding = self._ranks.context.sharding
        if any(norm for _, norm in gradients):  # else the ranks have computed nothing
            sharding.undivided = all(checksums.are_equal(one, gradients[0], torch.float32) for one in gradients)
        # A few steps are nothing to warn of.
        if sharding.undivided and self.averagings >= checksums.FIRST and self._ranks.rank == 0:
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


def _as_number(rate: Any) -> float:
    """Return a learning rate as a number; NaN where a group has none."""
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) else math.nan
