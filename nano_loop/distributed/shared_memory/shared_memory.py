"""The transport between ranks of one host: through memory that they share, several times as fast as gloo's loopback."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from nano_loop.distributed.comm.packing import Packing, Signature, pack, signature
from nano_loop.distributed.comm.ranks import Ranks, Reached
from nano_loop.distributed.shared_memory.shared_ring import BetweenHosts, Elements, Plan, Ring
from nano_loop.errors import NanoError, error_message

_CHUNK = 1 << 20  # bytes that are copied, summed and copied back at once; the ring of them stays in a cache
_LEAST = 1 << 16  # such bytes where all gradients together are few
_SLOTS = 3  # one is copied in, one summed, one copied out


class SharedMemoryTransport:
    """Averages through a ring of slots in a file that all ranks map.

    Parameters
    ----------
    ranks : Ranks
        Two or more, all on this host. Collective.
    mapped : callable
        See `SharedSegment`, such as `map_together` with a folder of a file system in memory.
    chunk : int
        Bytes that are averaged at once, a multiple of 128.
    slots : int
        Such chunks under way at a time, two or more.
    between : BetweenHosts, optional
        In a run on several hosts.

    Raises
    ------
    NanoError
        What `mapped` raises, if there is no room.
    """

    def __init__(
        self,
        ranks: Ranks,
        mapped: Callable[[int], mmap.mmap],
        *,
        chunk: int = _CHUNK,
        slots: int = _SLOTS,
        between: BetweenHosts | None = None,
    ) -> None:
        ring = Ring(ranks, mapped, chunk, slots, between)
        #: Bytes that are averaged at once.
        self.chunk = chunk
        self._ring: Ring | None = ring

        @lru_cache(maxsize=64)
        def plan(signature: Signature) -> Plan:  # not a method, which would hold the memory in a cycle after `close`
            return ring.plan(pack(signature, chunk))

        self._plan = plan

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor in place by its mean over all ranks, which is the same to the bit on every rank.

        Collective.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            On the CPU, of float32, float64, bfloat16, float16, complex64 or complex128, of any strides without
            overlap. Every rank gives the same shapes and dtypes in the same order; strides may differ.

        Raises
        ------
        NanoError
            Where a dtype is another, where a rank that this one waits for has failed, or is too late, and on every rank
            where they give different lists.
        """
        ring = self._open()
        plan = self._plan(signature(tensors))
        elements = Elements([*tensors], plan.packing.flat(tensors))
        _finish(ring.average(plan, elements, elements))

    def stream(self, targets: Sequence[torch.Tensor]) -> Stream:
        """Begin to average a list whose tensors are still to arrive. It has to be finished before the next averaging.

        Collective, and only in a run on several hosts.

        Parameters
        ----------
        targets : sequence of torch.Tensor
            Where the means go: of the list's shapes and dtypes.
        """
        ring = self._open()
        plan = self._plan(signature(targets))
        sources, means = Elements([None] * len(targets), {}), Elements([*targets], plan.packing.flat(targets))
        return Stream(plan.packing, sources, ring.average(plan, sources, means))

    def leave(self) -> None:
        """Announce that this rank averages no more, so that a rank which waits for it raises at once."""
        self._open().segment.leave()

    def close(self) -> None:
        """Give back all memory. A closed transport raises on use."""
        if self._ring is not None:
            self._ring.segment.close()
            self._ring = None
            del self._plan

    def _open(self) -> Ring:
        if self._ring is None:
            raise NanoError(error_message("averaging after the run", "the transport is closed", "Start another run"))
        return self._ring


class Stream:
    """A list that is averaged while its tensors arrive.

    Parameters
    ----------
    packing : Packing
        How the list is packed.
    sources : Elements
        Its tensors, none of which is there yet.
    averaging : iterator of Reached
        What is left to do.
    """

    def __init__(self, packing: Packing, sources: Elements, averaging: Iterator[Reached]) -> None:
        self._packing, self._sources, self._averaging = packing, sources, averaging
        self._reached = next(averaging, None)

    @torch.no_grad()
    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Take a tensor of the list, which stays as it is until `finish`, and go on as far as there is no wait."""
        self._sources.tensors[index] = tensor
        if index in self._packing.split:
            self._sources.flat[index] = tensor.contiguous().view(-1)
        while self._reached is not None and self._reached(False):
            self._reached = next(self._averaging, None)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until all tensors, which have arrived, are averaged."""
        if self._reached is not None:
            self._reached(True)
            _finish(self._averaging)
            self._reached = None


def _finish(steps: Iterator[Reached]) -> None:
    for reached in steps:
        reached(True)


def chunk_for(nbytes: int) -> int:
    """Return the chunk for gradients of so many bytes together: memory that nobody uses takes time to make.

    For a model of some thousand parameters, the memory for the largest chunk took 20 ms of each run.
    """
    return min(max(1 << max(nbytes - 1, 0).bit_length(), _LEAST), _CHUNK)
