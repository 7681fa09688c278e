"""Gradients between hosts travel in buckets, as with torch's `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import distributed

from nano_loop.distributed.comm.averaging_math import divide, is_summed_wider, real
from nano_loop.distributed.comm.packing import Packing, Places, Signature, pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoError, error_message

_CAPACITY = 25 << 20  # bytes of a bucket


class _Plan(NamedTuple):
    """How a list is packed, and the buckets that each of its tensors has a part in."""

    packing: Packing
    buckets_of: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def _plan(signature: Signature, capacity: int) -> _Plan:
    packing = pack(signature, capacity)
    buckets_of: list[list[int]] = [[] for _ in signature[0]]
    for number, batch in enumerate(packing.batches):
        for piece in batch.pieces:
            buckets_of[piece.index].append(number)
    return _Plan(packing, tuple(map(tuple, buckets_of)))


class GroupTransport:
    """Averages over a process group. A bucket travels as soon as its tensors and the buckets before it are there.

    Elements of 16 bits travel and are summed in float32.

    Parameters
    ----------
    ranks : Ranks
        All ranks, with a default process group between them.
    group : torch.distributed.ProcessGroup, optional
        One that carries nothing else, for lists that travel while values do; by default, the default group.
    capacity : int
        Bytes of a bucket.
    """

    def __init__(self, ranks: Ranks, group: Any = None, *, capacity: int = _CAPACITY) -> None:
        self._ranks, self._group, self._capacity = ranks, group, capacity
        self._memory: list[torch.Tensor] = []  # of each bucket; kept, since new pages take time
        self._is_open, self._has_begun = True, False
        self._plan = _plan(((), ()), capacity)
        self._tensors: list[Any] = []  # of the list under way, but those that have not arrived
        self._flat: dict[int, torch.Tensor] = {}
        self._missing: list[int] = []  # tensors of each bucket
        self._buckets: list[torch.Tensor] = []
        self._places: list[Places] = []
        self._sent: list[Any] = []  # what all_reduce has returned, of the buckets that travel

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor in place by its mean over all ranks, the same to the bit on every rank.

        Collective. See `SharedMemoryTransport.average`.
        """
        self.begin(signature(tensors))
        for index, tensor in enumerate(tensors):
            self.add(index, tensor)
        self.finish()
        self.write(tensors)

    def begin(self, signature: Signature) -> None:
        """Begin to average a list whose tensors are still to arrive. Collective."""
        if not self._is_open:
            raise NanoError(error_message("averaging after the run", "the transport is closed", "Start another run"))
        if self._has_begun:
            got = "an averaging after one that was interrupted"
            raise NanoError(error_message(got, "the ranks are out of step", "Start another run"))
        self._plan = _plan(signature, self._capacity)
        batches = self._plan.packing.batches
        self._tensors, self._flat, self._sent = [None] * len(signature[0]), {}, []
        self._missing = [len(batch.pieces) for batch in batches]
        self._buckets = [self._bucket(number, batch.length, batch.dtype) for number, batch in enumerate(batches)]
        self._places = [batch.places(bucket) for batch, bucket in zip(batches, self._buckets, strict=True)]
        self._has_begun = True

    @torch.no_grad()
    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Take a tensor of the list, each once, and send what is complete."""
        self._tensors[index] = tensor
        if index in self._plan.packing.split:
            self._flat[index] = tensor.contiguous().view(-1)
        for number in self._plan.buckets_of[index]:
            self._missing[number] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._places[len(self._sent)].fill(self._tensors, self._flat)
            self._send()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means. A bucket in which a tensor is missing is sent, too: the other ranks wait for it."""
        while len(self._sent) < len(self._buckets):
            self._send()
        for work, bucket in zip(self._sent, self._buckets, strict=True):
            self._ranks.finish(work)
            divide(real(bucket), self._ranks.size)
        self._tensors, self._flat, self._sent = [], {}, []
        self._has_begun = False

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the means of a list that `finish` has ended to `tensors`, which have its shapes."""
        flat = self._plan.packing.flat(tensors)
        for places in self._places:
            places.empty(tensors, flat)
        self._plan.packing.put_back(tensors, flat)

    def leave(self) -> None:
        """Announce nothing: the ranks of several hosts find out by the timeout, or by their launcher."""

    def close(self) -> None:
        """Give back all memory, and the group.

        A group of gloo that is collected as garbage in a forked process, such as a loader's worker, ends that process:
        it joins threads that are not there.
        """
        self._memory, self._buckets, self._places, self._sent = [], [], [], []
        self._group, self._is_open = None, False

    def _send(self) -> None:
        bucket = real(self._buckets[len(self._sent)])
        self._sent.append(distributed.all_reduce(bucket, group=self._group, async_op=True))

    def _bucket(self, number: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        dtype = torch.float32 if is_summed_wider(dtype) else dtype
        nbytes = length * dtype.itemsize
        if number == len(self._memory):
            self._memory.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._memory[number].numel() < nbytes:
            self._memory[number] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[number][:nbytes].view(dtype)
