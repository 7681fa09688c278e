"""The channel between ranks on several hosts: torch's process group."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import distributed

from nano_loop.distributed.comm.mismatch import CallSite, mismatch_message
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoError

_HEAD = struct.Struct("<qq")  # the length, and a checksum of the operation
_FIRST = 496  # payload bytes sent in the same message


class ProcessGroupChannel:
    """A channel of two or more ranks over the default process group. See `Channel`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def exchange(self, data: bytes | memoryview, what: str) -> list[bytearray]:
        """See `Channel.exchange`."""
        # Send the length and the start of the payload in one message.
        first = _HEAD.pack(len(data), zlib.crc32(what.encode())) + bytes(data[:_FIRST]).ljust(_FIRST, b"\0")
        firsts = self._gather(_tensor(first))
        sizes, marks = zip(*map(_HEAD.unpack_from, firsts), strict=True)
        if len({*marks}) > 1:  # detected by all ranks
            sites = self.exchange(CallSite.of_this_rank(what).pack(), "call sites")
            raise NanoError(mismatch_message(self._ranks.rank, dict(enumerate(map(CallSite.unpack, sites)))))
        rests = [b""] * len(sizes)
        long = [rank for rank, size in enumerate(sizes) if size > _FIRST]
        rest = torch.empty(max(sizes) - _FIRST if long else 0, dtype=torch.uint8)
        rest[: max(len(data) - _FIRST, 0)] = _tensor(data[_FIRST:])
        if len(long) == 1:  # such as a broadcast
            self._ranks.finish(distributed.broadcast(rest, long[0], async_op=True))
            rests[long[0]] = bytes(rest.numpy())
        elif long:
            rests = self._gather(rest)
        wholes = [bytearray(first[_HEAD.size :] + rest) for first, rest in zip(firsts, rests, strict=True)]
        return [whole[:size] for whole, size in zip(wholes, sizes, strict=True)]

    def _gather(self, data: torch.Tensor) -> list[bytes]:
        """Return the bytes of all ranks, which must have equal lengths."""
        received = [torch.empty_like(data) for _ in range(self._ranks.size)]
        self._ranks.finish(distributed.all_gather(received, data, async_op=True))
        return [bytes(tensor.numpy()) for tensor in received]


def _tensor(data: bytes | memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
