"""The channel between ranks of several hosts: torch's process group."""

from __future__ import annotations

import struct

import torch
from torch import distributed

from nano_loop.distributed.comm.ranks import Ranks

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

    def exchange(self, data: bytes | memoryview, what: str) -> list[bytearray]:
        """See `Channel.exchange`."""
        # The length, and what a short message has, travel at once.
        first = _LENGTH.pack(len(data)) + bytes(data[:_FIRST]).ljust(_FIRST, b"\0")
        firsts = self._gather(_tensor(first))
        sizes = [_LENGTH.unpack_from(first)[0] for first in firsts]
        rests = [b""] * len(sizes)
        long = [rank for rank, size in enumerate(sizes) if size > _FIRST]
        rest = torch.empty(max(sizes) - _FIRST if long else 0, dtype=torch.uint8)
        rest[: max(len(data) - _FIRST, 0)] = _tensor(data[_FIRST:])
        if len(long) == 1:  # as of a broadcast
            self._ranks.finish(distributed.broadcast(rest, long[0], async_op=True))
            rests[long[0]] = bytes(rest.numpy())
        elif long:
            rests = self._gather(rest)
        wholes = [bytearray(first[_LENGTH.size :] + rest) for first, rest in zip(firsts, rests, strict=True)]
        return [whole[:size] for whole, size in zip(wholes, sizes, strict=True)]

    def _gather(self, data: torch.Tensor) -> list[bytes]:
        """Return the bytes of all ranks, as many of each."""
        received = [torch.empty_like(data) for _ in range(self._ranks.size)]
        self._ranks.finish(distributed.all_gather(received, data, async_op=True))
        return [bytes(tensor.numpy()) for tensor in received]


def _tensor(data: bytes | memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
