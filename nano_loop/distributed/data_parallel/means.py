"""Sets gradients to their means over the ranks, by shared memory or by a group while the backward still computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.agreement import Fingerprint
from nano_loop.distributed.data_parallel.buckets import GroupTransport, Overlap
from nano_loop.distributed.data_parallel.gradients import (
    AveragedGradients,
    DenseGradients,
    are_all_dense,
    average_sparse,
    by_kind,
)
from nano_loop.distributed.shared_memory.shared_ring import SharedMemoryTransport

Transport = SharedMemoryTransport | GroupTransport


class Means:
    """The means of a run's gradients; if `overlapped`, a `GroupTransport` sends some while others are computed."""

    def __init__(self, ranks: Ranks, transport: Transport, *, overlapped: bool) -> None:
        self._ranks, self._transport = ranks, transport
        self._posted: DenseGradients | None = None  # the gradients that the other ranks can read, until `compute`
        #: The gradients that are sent in the current backward.
        self.overlap = Overlap(transport if overlapped and isinstance(transport, GroupTransport) else None)
        self.averaged = AveragedGradients()  # the gradients that are means

    def post(self, parameters: Sequence[torch.Tensor], arrived: bytes) -> bool:
        """Let the other ranks read all gradients, if they are few and dense; return whether they can. Collective."""
        self._posted = None
        if isinstance(self._transport, SharedMemoryTransport):
            with torch.no_grad():
                gradients = DenseGradients(parameters) if are_all_dense([arrived]) else None
                if self._transport.post(None if gradients is None else gradients.tensors):
                    self._posted = gradients
        return self._posted is not None

    def compute(self, parameters: list[torch.Tensor], fingerprints: Sequence[Fingerprint]) -> None:
        """Set the gradients of parameters to the means over all ranks, if any rank has one. Collective."""
        posted, self._posted = self._posted, None
        if posted is not None and all(fingerprint.is_posted for fingerprint in fingerprints):
            with torch.no_grad():
                self._transport.average_posted(posted.tensors)  # type: ignore[union-attr]
                posted.put_back()
            self.averaged.note(parameters)
            return
        arrived = [fingerprint.arrived for fingerprint in fingerprints]
        dense, sparse = by_kind(parameters, arrived)
        done = self.overlap.finish([fingerprint.overlap for fingerprint in fingerprints])
        in_turn = dense[::-1]  # in the order in which a backward computes them
        with torch.no_grad():
            gradients = DenseGradients([parameter for parameter in in_turn if id(parameter) not in done])
            if gradients.tensors:
                self._transport.average(gradients.tensors)
            gradients.put_back()
            average_sparse(sparse, self._ranks)
        self.overlap.expect(in_turn if are_all_dense(arrived) else [])
        self.averaged.note([*dense, *sparse])
