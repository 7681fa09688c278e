"""The transport between ranks of one host: through memory that they share, several times as fast as gloo's loopback."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from nano_loop.distributed.comm.packing import Signature, pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.shared_ring import Plan, Ring
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
    ) -> None:
        ring = Ring(ranks, mapped, chunk, slots)
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
        ring.average(self._plan(signature(tensors)), tensors)

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


def chunk_for(nbytes: int) -> int:
    """Return the chunk for gradients of so many bytes together: memory that nobody uses takes time to make.

    For a model of some thousand parameters, the memory for the largest chunk took 20 ms of each run.
    """
    return min(max(1 << max(nbytes - 1, 0).bit_length(), _LEAST), _CHUNK)
