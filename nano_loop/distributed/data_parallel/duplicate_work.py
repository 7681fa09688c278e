"""Ranks that all compute the same: then several processes gain nothing, and nothing says so.

Each fingerprint of an averaging at which parameters are compared also has a checksum of the rank's own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.checksums import FIRST, are_equal, sum_and_norm
from nano_loop.errors import error_message
from nano_loop.patching.user_code import warn_once

#: The sum of all gradients of a rank, and their norm.
Checksum = tuple[float, float]

_GAIN = "several processes gain nothing, and auto_lr leaves the rate at 1×"
_ADVICE = (
    "Iterate a DataLoader in train mode, or one that setup_dataloaders(loader, shard=True) has set up, whose dataset "
    "returns the rows of the index. Or take other batches on each rank, such as "
    "x[nano_loop.global_rank()::nano_loop.world_size()]. Otherwise leave out num_processes"
)


def gradient_checksum(parameters: Sequence[torch.Tensor]) -> Checksum:
    """Return the checksum of the gradients of `parameters`, each of which counts with another factor."""
    total = norm = 0.0
    for factor, parameter in enumerate(parameters, start=1):
        sum_, length = sum_and_norm(parameter.grad)
        total, norm = total + factor * sum_, norm + factor * length
    return total, norm


def note_duplicate_work(ranks: Ranks, checksums: Sequence[Checksum], averagings: int) -> None:
    """Note in ``ranks.context.sharding`` whether all ranks have computed the same; warn once if they go on to.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    checksums : sequence of Checksum
        Those of all ranks, by rank.
    averagings : int
        How many averagings there have been; a few steps are nothing to warn of.
    """
    sharding = ranks.context.sharding
    if any(norm for _, norm in checksums):  # else the ranks have computed nothing
        sharding.undivided = all(are_equal(one, checksums[0], torch.float32) for one in checksums)
    if sharding.undivided and averagings >= FIRST and ranks.rank == 0:
        warn_once(error_message(f"each of the {ranks.size} ranks computes the same batches", _GAIN, _ADVICE))
