"""The channel between ranks of one host: streams of bytes through memory that they share.

Every collective is an exchange: each rank has a stream of bytes, which may be empty, and all streams move on by one
piece at a time. A rank copies a piece into one of its two slots, counts it, waits until all others have counted as
many, and reads what it needs of their slots. It overwrites a slot two pieces later. By then all others have counted the
piece in between, which they do after they have read this one, so one counter for each rank is enough.

With each piece goes a mark of what the rank does. So ranks that do different things find out.
"""

from __future__ import annotations

import threading
import zlib
from copy import copy
from functools import partial
from pathlib import Path

import torch

from nano_loop.distributed.comm.mismatch import CallSite, mismatch_message
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.raw_bytes import Receive, parts_of_streams, raw_bytes
from nano_loop.distributed.shared_memory.reductions import Reduction
from nano_loop.distributed.shared_memory.shared_file import map_by_name, refuse_failed
from nano_loop.distributed.shared_memory.shared_segment import SharedSegment
from nano_loop.errors import NanoError

_PIECE = 1 << 17  # bytes; two slots of each rank stay in a cache
_POSTED = 0  # the counter
_LENGTHS, _MARKS = 1, 3  # words behind it, two of each


class SharedChannel:
    """A channel through a file that all ranks map. See `Channel`.

    Parameters
    ----------
    ranks : Ranks
        Two or more, all on this host. Collective.
    folder : pathlib.Path
        A private folder of theirs, in which they meet.
    name : str
        Of the channel; no other in the folder has it.
    piece : int
        Bytes of a stream that travel at once, a multiple of 128.

    Raises
    ------
    NanoError
        If a rank has no room in the folder, on every rank, or another rank has not come in time. Also what
        `Ranks.check` raises.
    """

    def __init__(self, ranks: Ranks, folder: Path, name: str = "channel", *, piece: int = _PIECE) -> None:
        path = folder / name
        self._ranks = ranks
        self._piece = piece
        self._steps = 0
        self._lock = threading.RLock()
        waiting = True

        def check() -> None:
            ranks.check()
            if waiting:
                refuse_failed(path)

        watched = copy(ranks)
        watched.check = check
        mapped, nbytes = partial(map_by_name, path, ranks.names[ranks.rank]), 2 * ranks.size * piece
        try:
            self._segment = SharedSegment(watched, 1, nbytes, mapped)
            self._posted = self._segment.places(_POSTED)
            self._slots = raw_bytes(self._segment.memory)
            self.barrier()  # all have mapped it
        finally:
            waiting = False
            if ranks.rank == 0:
                path.unlink(missing_ok=True)

    @property
    def segment(self) -> SharedSegment:
        """The counters by which ranks wait for each other."""
        return self._segment

    def gather(self, data: bytes, what: str = "") -> list[bytes]:
        """See `Channel.gather`."""
        received = [bytearray() for _ in range(self._ranks.size)]
        self.exchange(what or "gather", memoryview(data), lambda rank, _, piece: received[rank].extend(piece))
        return [bytes(stream) for stream in received]

    def broadcast(self, data: bytes, source: int, what: str = "") -> bytes:
        """See `Channel.broadcast`."""
        received = bytearray()
        sent = memoryview(data) if self._ranks.rank == source else memoryview(b"")
        self.exchange(what or f"broadcast of {source}", sent, lambda rank, _, piece: received.extend(piece))
        return bytes(received)

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """See `Channel.broadcast_tensor`."""
        content, own = raw_bytes(tensor), self._ranks.rank == source
        said = f"broadcast of {source}, {len(content)} bytes"
        receive = _ignore if own else parts_of_streams([tensor], [0], source)
        self.exchange(said, content if own else memoryview(b""), receive)

    def add_up(self, tensor: torch.Tensor) -> None:
        """See `Channel.add_up`."""
        self.reduce(tensor, Reduction(torch.distributed.ReduceOp.SUM, tensor.dtype), everywhere=True)

    def barrier(self) -> None:
        """See `Channel.barrier`."""
        self.exchange("barrier", memoryview(b""), _ignore)

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, *, everywhere: bool) -> None:
        """Combine the contiguous tensors of all ranks, and write the result to `tensor`; on this rank, if asked.

        Parameters
        ----------
        tensor : torch.Tensor
            Of the same dtype and number of elements on every rank.
        reduction : Reduction
            How.
        everywhere : bool
            Whether this rank wants the result.
        """
        flat = tensor.detach().view(-1)
        said = f"{reduction.name} of {flat.numel()} {flat.dtype}"
        self.exchange(said, raw_bytes(flat), self.combining(flat, reduction) if everywhere else _ignore)

    def combining(self, total: torch.Tensor, reduction: Reduction, start: int = 0) -> Receive:
        """Return what writes to `total` the reduction of the parts of all streams that begin at byte `start`."""
        size, last = total.dtype.itemsize, self._ranks.size - 1
        end = start + total.numel() * size

        def receive(rank: int, offset: int, piece: memoryview) -> None:
            first, after = max(start, offset), min(end, offset + len(piece))
            if first >= after:
                return
            other = torch.frombuffer(piece[first - offset : after - offset], dtype=total.dtype)
            part = total[(first - start) // size : (after - start) // size]
            if rank == 0:
                part.copy_(other)
            else:
                reduction.combine(part, other)
            if rank == last:
                reduction.finish(part, last + 1)

        return receive

    def exchange(self, what: str, stream: memoryview, receive: Receive) -> None:
        """Send `stream` to all ranks, and give each piece of each rank's stream, one's own too, to `receive`.

        Pieces that begin at the same place come in the order of ranks.

        Parameters
        ----------
        what : str
            What this rank does, which has to be the same on all ranks.
        stream : memoryview
            Bytes; each rank's have their own length. `receive` may overwrite what it has been given already.
        receive : callable
            See `Receive`.
        """
        with self._lock:
            self._segment.begin()
            mark = zlib.crc32(what.encode())
            sent, longest = 0, 1
            while sent < longest:
                longest = self._exchange_piece(what, mark, stream, sent, receive)
                sent += self._piece
            self._segment.end()

    def leave(self, *, returned: bool) -> None:
        """Announce that this rank exchanges no more; see `SharedSegment.leave`."""
        self._segment.leave(returned=returned)

    def close(self) -> None:
        """Give back the memory."""
        self._slots.release()
        self._segment.close()

    def _exchange_piece(self, what: str, mark: int, stream: memoryview, sent: int, receive: Receive) -> int:
        """Exchange what begins at `sent`, and return the length of the longest stream."""
        words, own_place, size, length = self._segment.words, self._posted[self._ranks.rank], self._piece, len(stream)
        self._steps += 1
        turn = self._steps % 2
        if sent < length:
            slot = (turn * self._ranks.size + self._ranks.rank) * size
            piece = stream[sent : sent + size]
            self._slots[slot : slot + len(piece)] = piece
        words[own_place + _LENGTHS + turn], words[own_place + _MARKS + turn] = length, mark
        self._segment.publish(own_place, self._steps)
        self._segment.wait(self._posted, self._steps, what)
        if any(words[place + _MARKS + turn] != mark for place in self._posted):  # which all ranks find
            raise NanoError(self._mismatch(what))
        longest = 0
        for rank, place in enumerate(self._posted):
            length = words[place + _LENGTHS + turn]
            if sent < length:
                slot = (turn * self._ranks.size + rank) * size
                receive(rank, sent, self._slots[slot : slot + min(size, length - sent)])
            longest = max(longest, length)
        return longest

    def _mismatch(self, what: str) -> str:
        """Exchange what each rank does, and where, and return the message for it."""
        received: dict[int, CallSite] = {}

        def receive(rank: int, _: int, piece: memoryview) -> None:
            received[self._ranks.names[rank]] = CallSite.unpack(bytes(piece))

        own_site = memoryview(CallSite.of_this_rank(what).pack()[: self._piece])
        self._exchange_piece(_MISMATCH, zlib.crc32(_MISMATCH.encode()), own_site, 0, receive)
        return mismatch_message(self._ranks.names[self._ranks.rank], received)


def _ignore(rank: int, start: int, piece: memoryview) -> None:
    """Take nothing of the streams."""


_MISMATCH = "call sites"
