"""Compares what ranks may have changed by themselves, from time to time, and makes buffers equal where wanted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel import checksums
from nano_loop.distributed.data_parallel.buffers import Sync, make_buffers_equal, message_of_unequal_buffer
from nano_loop.distributed.data_parallel.gradients import AveragedGradients
from nano_loop.distributed.data_parallel.parameters import Parameters
from nano_loop.errors import RankLateError, RankLeftError
from nano_loop.patching.user_code import warn

_BUFFER = "a buffer"


class Comparison:
    """Compares the parameters and the buffers of the ranks at some averagings.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    is_enabled : bool
        Whether anything is compared; see `checksums`.
    sync_buffers : {"average", "rank0"} or None
        How buffers are made equal after each averaging. None: they are compared.
    """

    def __init__(self, ranks: Ranks, is_enabled: bool, sync_buffers: Sync) -> None:
        self._ranks = ranks
        self._is_enabled = is_enabled
        self._sync_buffers = sync_buffers

    def after(self, averagings: int, parameters: Parameters, overwritten: Sequence[int]) -> None:
        """Compare after an averaging. Collective.

        Parameters
        ----------
        averagings : int
            How many there have been before.
        parameters : Parameters
            What is averaged.
        overwritten : sequence of int
            The places of the parameters that calls have overwritten since the last averaging, on any rank.

        Raises
        ------
        NanoWorkerError
            If a parameter differs.
        """
        is_due = checksums.is_due(averagings)
        if self._is_enabled and (overwritten or is_due):
            named = parameters.named
            compared = named if is_due else [named[place] for place in overwritten]
            own_checksums = checksums.checksums([parameter for _, parameter in compared])
            checksums.refuse_unequal(self._ranks.channel.gather(own_checksums, AVERAGING), compared)
        if self._sync_buffers is not None:
            make_buffers_equal(self._ranks, parameters.models, self._sync_buffers)
        elif self._is_enabled and is_due and _BUFFER not in self._ranks.context.sharding.warnings_given:
            message = message_of_unequal_buffer(self._ranks, parameters.models)
            if message is not None:
                warn_once_a_run(self._ranks, message, _BUFFER)

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
        own_checksums = checksums.checksums([parameter for _, parameter in rest])
        with suppress(RankLeftError, RankLateError):
            checksums.refuse_unequal(self._ranks.channel.gather(own_checksums, AVERAGING), rest)


def warn_once_a_run(ranks: Ranks, message: str, kind: str) -> None:
    """Warn on rank 0, of each kind once a run. Every rank knows then that the warning was given."""
    warnings_given = ranks.context.sharding.warnings_given
    if kind not in warnings_given:
        warnings_given.add(kind)
        if ranks.rank == 0:
            warn(message)
