"""The channel between ranks of several hosts: torch's process group."""

from __future__ import annotations

import struct

import torch
from torch import distributed

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.raw_bytes import raw_tensor

_LENGTH = struct.Struct("<q")
_FIRST = 504  # bytes that travel with the length, in one message


class ProcessGroupChannel:
    """A channel over the default process group. See `Channel`.

    Parameters
    ----------
    ranks : Ranks
        Two or more, with a default process group between them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def gather(self, data: bytes, what: str = "") -> list[bytes]:
        """See `Channel.gather`."""
        # The length, and what a short message has, travel at once.
        firsts = self._gather(_LENGTH.pack(len(data)) + data[:_FIRST].ljust(_FIRST, b"\0"))
        sizes = [_LENGTH.unpack_from(first)[0] for first in firsts]
        wholes, longest = [first[_LENGTH.size :] for first in firsts], max(sizes) - _FIRST
        if longest > 0:
            rests = self._gather(data[_FIRST:].ljust(longest, b"\0"))
            wholes = [whole + rest for whole, rest in zip(wholes, rests, strict=True)]
        return [whole[:size] for whole, size in zip(wholes, sizes, strict=True)]

    def broadcast(self, data: bytes, source: int, what: str = "") -> bytes:
        """See `Channel.broadcast`."""
        length = torch.tensor([len(data)])
        self._ranks.finish(distributed.broadcast(length, source, async_op=True))
        own = self._ranks.rank == source
        content = _tensor(data) if own else torch.empty(int(length), dtype=torch.uint8)
        self._ranks.finish(distributed.broadcast(content, source, async_op=True))
        return data if own else bytes(content.numpy())

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """See `Channel.broadcast_tensor`; as bytes, for gloo does not know all dtypes."""
        self._ranks.finish(distributed.broadcast(raw_tensor(tensor), source, async_op=True))

    def add_up(self, tensor: torch.Tensor) -> None:
        """See `Channel.add_up`."""
        self._ranks.finish(distributed.all_reduce(tensor, async_op=True))

    def barrier(self) -> None:
        """See `Channel.barrier`."""
        self._ranks.finish(distributed.all_reduce(torch.zeros(1), async_op=True))

    def _gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, as many of each."""
        received = [torch.empty(len(data), dtype=torch.uint8) for _ in range(self._ranks.size)]
        self._ranks.finish(distributed.all_gather(received, _tensor(data), async_op=True))
        return [bytes(tensor.numpy()) for tensor in received]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
