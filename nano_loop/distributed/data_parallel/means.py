"""Gradients become the means over the ranks: which of them, by what transport, and when they begin to travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.buckets import GroupTransport
from nano_loop.distributed.data_parallel.fingerprint import Fingerprint
from nano_loop.distributed.data_parallel.gradients import (
    AveragedGradients,
    DenseGradients,
    are_all_dense,
    average_sparse,
    by_kind,
)
from nano_loop.distributed.data_parallel.overlap import NONE, Overlap
from nano_loop.distributed.shared_memory.shared_ring import SharedMemoryTransport

Transport = SharedMemoryTransport | GroupTransport


class Means:
    """The means of gradients.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    transport : SharedMemoryTransport or GroupTransport
        Carries the gradients; it is not closed.
    overlapped : bool
        Whether averaging by a `GroupTransport` begins while the backward still computes; see `overlap`.

    Attributes
    ----------
    averaged : AveragedGradients
        The gradients that are means.
    """

    def __init__(self, ranks: Ranks, transport: Transport, *, overlapped: bool) -> None:
        self._ranks = ranks
        self._transport = transport
        self._overlap = Overlap(transport) if overlapped and isinstance(transport, GroupTransport) else None
        self.averaged = AveragedGradients()

    def use(self, transport: Transport) -> None:
        """Let another transport carry the gradients from now on. Collective, as what makes it is."""
        self._transport = transport

    def start(self, *, allowed: bool) -> None:
        """Note that a backward begins, which may be overlapped."""
        if self._overlap is not None:
            self._overlap.start(allowed=allowed)

    def send(self, parameter: torch.Tensor) -> None:
        """Send the gradient that has arrived for a parameter, if the backward is overlapped."""
        if self._overlap is not None:
            self._overlap.send(parameter)

    @property
    def overlap_state(self) -> int:
        """The state of `Overlap`."""
        return NONE if self._overlap is None else self._overlap.state

    def average(self, in_order: list[torch.Tensor], fingerprints: Sequence[Fingerprint]) -> None:
        """Give parameters the mean of all ranks' gradients, if any rank has one. Collective.

        Parameters
        ----------
        in_order : list of torch.Tensor
            All parameters, in the same order on every rank.
        fingerprints : sequence of Fingerprint
            Those of all ranks.
        """
        arrived = [fingerprint.arrived for fingerprint in fingerprints]
        dense, sparse = by_kind(in_order, arrived)
        overlaps = [fingerprint.overlap for fingerprint in fingerprints]
        done = () if self._overlap is None else self._overlap.finish(overlaps)
        self._average([parameter for parameter in dense if id(parameter) not in done], sparse)
        if self._overlap is not None:
            self._overlap.expect(dense[::-1] if are_all_dense(arrived) else [])
        self.averaged.note([*dense, *sparse])

    @torch.no_grad()
    def _average(self, dense: Sequence[torch.Tensor], sparse: Sequence[torch.Tensor]) -> None:
        """Average the gradients of parameters, all ranks in the same order. Collective."""
        gradients = DenseGradients(dense[::-1])  # in the order in which a backward makes them, as `Overlap` does
        if gradients.tensors:
            self._transport.average(gradients.tensors)
        gradients.put_back()
        average_sparse(sparse, self._ranks)
