"""Compares what ranks may have changed by themselves, at some averagings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel import checksums
from nano_loop.distributed.data_parallel.buffers import compared_buffers
from nano_loop.distributed.data_parallel.gradients import AveragedGradients
from nano_loop.distributed.data_parallel.initial_sync import Named
from nano_loop.distributed.data_parallel.parameters import Parameters
from nano_loop.errors import RankLateError, RankLeftError, error_message
from nano_loop.patching.user_code import warn

_BUFFER = "a call changes it by its rank's batch, and rank 0's is kept"
_MEAN = "Set it to nano_loop.all_reduce(value), the mean of all ranks, in the call"


class Comparison:
    """Compares the parameters and the buffers of the ranks at some averagings.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    is_enabled : bool
        Whether anything is compared; see `checksums`.
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
            buffers = compared_buffers(parameters.models)
            unequal = checksums.first_unequal(self._gathered(buffers), buffers)
            if unequal is not None:
                got = f"the buffer {unequal.name} is no longer the same on all ranks"
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

    def _gathered(self, named: Sequence[Named]) -> list[bytes]:
        """Return the checksums of all ranks."""
        return self._ranks.channel.gather(checksums.checksums([tensor for _, tensor in named]), AVERAGING)


def warn_once_a_run(ranks: Ranks, message: str, kind: str) -> None:
    """Warn on rank 0, of each kind once a run. Every rank knows then that the warning was given."""
    warnings_given = ranks.context.sharding.warnings_given
    if kind not in warnings_given:
        warnings_given.add(kind)
        if ranks.rank == 0:
            warn(message)
