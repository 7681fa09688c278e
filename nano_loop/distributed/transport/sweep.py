"""One list of tensors on its way through the slots of this host, and between the hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from nano_loop.distributed.transport.between_hosts import BetweenHosts, UnderWay
from nano_loop.distributed.transport.host_ring import HostRing
from nano_loop.distributed.transport.packing import Batch, Packing

#: Returns by what a host's mean of a batch is multiplied before it goes to the other hosts.
Factor = Callable[[Batch], float]


class Sweep:
    """A list that is averaged: its tensors arrive one by one, and batch after batch goes through the ring.

    Each batch is posted, reduced, sent and copied out, each stage in the order of the batches.

    Parameters
    ----------
    packing : Packing
        How the list is packed.
    ring : HostRing
        The slots of this host.
    between : BetweenHosts or None
        For the first rank of a host.
    factor : callable
        See `Factor`.
    base : int
        How many batches have gone through the ring before.
    slots : int
        How many batches the ring holds.
    targets : sequence of torch.Tensor
        Where the means go: of the shapes and dtypes of the list.
    """

    def __init__(
        self,
        packing: Packing,
        ring: HostRing,
        between: BetweenHosts | None,
        factor: Factor,
        *,
        base: int,
        slots: int,
        targets: Sequence[torch.Tensor],
    ) -> None:
        self._packing, self._ring, self._between, self._factor = packing, ring, between, factor
        self._base, self._last = base, slots - 1
        self._targets, self._target_parts = targets, packing.flat(targets)
        self._tensors: list[torch.Tensor] = [*targets]  # what has not arrived yet is not posted
        self._parts: dict[int, torch.Tensor] = {}
        self._missing = [len({piece.index for piece in batch.pieces}) for batch in packing.batches]
        self._holders: dict[int, list[int]] = {}
        for number, batch in enumerate(packing.batches):
            for index in {piece.index for piece in batch.pieces}:
                self._holders.setdefault(index, []).append(number)
        self._posted = self._reduced = self._sent = self._copied = 0
        self._under_way: deque[UnderWay] = deque()

    def arrived(self, index: int, tensor: torch.Tensor) -> None:
        """Take a tensor of the list, which stays as it is until its batches are posted."""
        self._tensors[index] = tensor
        if index in self._packing.split:
            self._parts[index] = tensor.contiguous().view(-1)
        for number in self._holders.get(index, ()):
            self._missing[number] -= 1

    def advance(self) -> None:
        """Carry on what can be carried on without a wait."""
        ring, base, count = self._ring, self._base, len(self._packing.batches)
        while self._posted < min(count, self._copied + self._last + 1) and self._may_be_posted():
            self._post()
        while self._reduced < self._posted and ring.posted(base + self._reduced, wait=False):
            self._reduce()
        while self._between and self._sent < self._reduced and ring.reduced(base + self._sent, wait=False):
            self._send(self._between)
        while self._copied < count and self._is_back():
            self._copy_out()

    def finish(self) -> None:
        """Wait until all tensors, which have arrived, are averaged.

        In each step of this order a rank waits only for what others do in an earlier one, so nobody waits for ever.
        """
        ring, base, count = self._ring, self._base, len(self._packing.batches)
        for step in range(count + self._last):
            while self._posted <= step and self._posted < count:
                ring.free(base + self._posted)
                self._post()
            while self._reduced < min(step, count):
                ring.posted(base + self._reduced)
                self._reduce()
            while self._between and self._sent < min(step - 1, count):
                ring.reduced(base + self._sent)
                self._send(self._between)
            while self._copied <= step - self._last:
                if self._between is None:
                    ring.sent(base + self._copied)
                self._copy_out()
        self._packing.put_back(self._targets, self._target_parts)

    def _may_be_posted(self) -> bool:
        return not self._missing[self._posted] and self._ring.free(self._base + self._posted, wait=False)

    def _post(self) -> None:
        batch = self._packing.batches[self._posted]
        own = self._ring.own(self._base + self._posted, batch)
        batch.places(own).fill(self._tensors, self._parts)
        self._ring.post(self._base + self._posted)
        self._posted += 1

    def _reduce(self) -> None:
        batch = self._packing.batches[self._reduced]
        self._ring.reduce(self._base + self._reduced, batch, self._factor(batch))
        self._reduced += 1

    def _send(self, between: BetweenHosts) -> None:
        batch = self._packing.batches[self._sent]
        self._under_way.append(between.start(batch, self._ring.result(self._base + self._sent, between.nbytes(batch))))
        self._sent += 1

    def _is_back(self) -> bool:
        if self._between is None:
            return self._ring.sent(self._base + self._copied, wait=False)
        return bool(self._under_way) and self._between.is_finished(self._under_way[0])

    def _copy_out(self) -> None:
        number = self._base + self._copied
        if self._between is not None:
            self._between.finish(self._under_way.popleft())
            self._ring.publish_sent(number)
        batch = self._packing.batches[self._copied]
        result = self._ring.result(number, batch.nbytes).view(batch.dtype)
        batch.places(result).empty(self._targets, self._target_parts)
        self._ring.release(number)
        self._copied += 1
