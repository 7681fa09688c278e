"""The channel between ranks of several hosts: torch's process group, with nothing that it receives unpickled."""

from __future__ import annotations

import torch
from torch import distributed

from nano_loop.distributed.comm.channel import Codec
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.raw_bytes import raw_tensor
from nano_loop.errors import NanoError, error_message

_LONGEST = 1 << 40  # bytes: a length beyond it is no length


class ProcessGroupChannel:
    """A channel over the default process group. See `Channel`.

    Parameters
    ----------
    ranks : Ranks
        Two or more, with a default process group between them.
    codec : Codec
        For values.
    """

    def __init__(self, ranks: Ranks, codec: Codec) -> None:
        self.codec = codec
        self._ranks = ranks

    def gather(self, data: bytes, what: str = "") -> list[bytes]:
        """See `Channel.gather`."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks.size)]
        self._ranks.finish(distributed.all_gather(lengths, torch.tensor([len(data)]), async_op=True))
        sizes = [_length(length, rank) for rank, length in enumerate(lengths)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        received = [torch.empty_like(padded) for _ in sizes]
        self._ranks.finish(distributed.all_gather(received, padded, async_op=True))
        return [bytes(tensor[:size].numpy()) for tensor, size in zip(received, sizes, strict=True)]

    def broadcast(self, data: bytes, source: int, what: str = "") -> bytes:
        """See `Channel.broadcast`."""
        length = torch.tensor([len(data)])
        self._ranks.finish(distributed.broadcast(length, source, async_op=True))
        own = self._ranks.rank == source
        content = _tensor(data) if own else torch.empty(_length(length, source), dtype=torch.uint8)
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


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _length(received: torch.Tensor, sender: int) -> int:
    length = int(received)
    if not 0 <= length <= _LONGEST:
        got = f"rank {sender} announced a message of {length} bytes"
        expected = "a message has between 0 and 2**40 bytes"
        raise NanoError(error_message(got, expected, "Check who can reach the ranks' ports"))
    return length
