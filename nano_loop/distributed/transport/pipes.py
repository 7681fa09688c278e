"""Messages from one rank to another, beside the collectives: a ring of bytes in shared memory for each direction.

What one rank sends may not fit in the ring before the other receives. So a transfer goes on whenever its rank waits for
anything, and needs no thread.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nano_loop.distributed.ranks import Ranks, wait_until
from nano_loop.distributed.transport.raw_bytes import raw_bytes
from nano_loop.distributed.transport.shared_file import make_at_once, map_whole
from nano_loop.distributed.transport.shared_segment import LINE, SharedSegment
from nano_loop.errors import NanoError, problem

_ROOM = 1 << 18  # bytes under way
_START = mmap.PAGESIZE
_LENGTH = struct.Struct("<q")  # before each message
_WORD = 8


class Pipe:
    """One direction between two ranks, for messages of one tag.

    Parameters
    ----------
    path : pathlib.Path
        A file in the private folder of the run. Whichever rank is first makes it; it goes with the folder.
    fence : callable
        See `SharedSegment.fence`.
    """

    def __init__(self, path: Path, fence: Callable[[], None]) -> None:
        if not path.exists():
            make_at_once(str(path), _START + _ROOM)
        memory = memoryview(map_whole(str(path), _START + _ROOM))
        self._words = memory[:_START].cast("q")
        self._ring = memory[_START:]
        self._fence = fence
        self.waiting: deque[Transfer] = deque()  # in the order in which they were asked for

    def write(self, data: memoryview) -> int:
        """Write as much of `data` as there is room for, and return how much that is."""
        written, read = self._words[0], self._words[LINE // _WORD]
        self._fence()
        count = min(len(data), _ROOM - (written - read))
        for at, part in _parts(written, count):
            self._ring[at : at + len(part)] = data[part.start : part.stop]
        self._fence()
        self._words[0] = written + count
        return count

    def read(self, data: memoryview) -> int:
        """Fill as much of `data` as there is something for, and return how much that is."""
        written, read = self._words[0], self._words[LINE // _WORD]
        self._fence()
        count = min(len(data), written - read)
        for at, part in _parts(read, count):
            data[part.start : part.stop] = self._ring[at : at + len(part)]
        self._fence()
        self._words[LINE // _WORD] = read + count
        return count

    @property
    def filled(self) -> bool:
        """Whether something has been written that was not read."""
        return self._words[0] != self._words[LINE // _WORD]

    def advance(self) -> None:
        """Carry the transfers on as far as they get without waiting."""
        while self.waiting and self.waiting[0].advance():
            self.waiting.popleft()


def _parts(position: int, count: int) -> list[tuple[int, range]]:
    """Return where in the ring the next `count` bytes are, and which of the bytes those are."""
    at = position % _ROOM
    first = min(count, _ROOM - at)
    return [(at, range(first)), (0, range(first, count))]


class Transfer:
    """One message on its way, of which this rank is the sender or the receiver.

    Parameters
    ----------
    move : callable
        `Pipe.write` or `Pipe.read`.
    tensor : torch.Tensor
        What is sent, or overwritten.
    sends : bool
        Whether this rank is the sender.
    peer : int
        The other rank.
    """

    def __init__(self, move: Callable[[memoryview], int], tensor: torch.Tensor, *, sends: bool, peer: int) -> None:
        self._move = move
        self._tensor = tensor
        self._whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
        self._data = raw_bytes(self._whole)
        self._sends = sends
        self._header = bytearray(_LENGTH.pack(len(self._data)) if sends else _LENGTH.size)
        self._moved = 0  # bytes of the header and the data
        self.peer = peer
        self.done = False

    def advance(self) -> bool:
        """Move what can be moved now, and return whether all of it has been."""
        while self._moved < _LENGTH.size:
            moved = self._move(memoryview(self._header)[self._moved :])
            if not moved:
                return False
            self._moved += moved
            self._refuse_other_length()
        while (at := self._moved - _LENGTH.size) < len(self._data):
            moved = self._move(self._data[at:])
            if not moved:
                return False
            self._moved += moved
        if not self._sends and self._whole.data_ptr() != self._tensor.data_ptr():
            self._tensor.detach().copy_(self._whole)
        self.done = True
        return True

    def _refuse_other_length(self) -> None:
        if self._moved == _LENGTH.size and _LENGTH.unpack(self._header)[0] != len(self._data):
            given = f"rank {self.peer} sends {_LENGTH.unpack(self._header)[0]} bytes to a tensor of {len(self._data)}"
            advice = "Receive into a tensor of the shape and dtype that is sent"
            raise NanoError(problem(given, "a message and the tensor that receives it are of one size", advice))


class Pipes:
    """All pipes of one rank of a group.

    Parameters
    ----------
    ranks : Ranks
        The ranks of the group.
    folder : pathlib.Path
        The private folder of the run.
    name : str
        Of the group.
    segment : SharedSegment
        Of all ranks of the run, by which they see that another has left.
    members : sequence of int
        The rank in the run of each rank of the group.
    """

    def __init__(self, ranks: Ranks, folder: Path, name: str, segment: SharedSegment, members: Sequence[int]) -> None:
        self._ranks = ranks
        self._path = folder / f"pipe-{name}"
        self._segment = segment
        self._members = members
        self._pipes: dict[tuple[int, int, int], Pipe] = {}

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Begin to send a tensor to a rank of the group."""
        pipe = self._pipe(self._ranks.rank, peer, tag)
        return self._begin(pipe, Transfer(pipe.write, tensor, sends=True, peer=peer))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Begin to receive a tensor from a rank of the group."""
        pipe = self._pipe(peer, self._ranks.rank, tag)
        return self._begin(pipe, Transfer(pipe.read, tensor, sends=False, peer=peer))

    def receive_any(self, tensor: torch.Tensor, tag: int) -> Transfer:
        """Wait until any rank has sent something, and begin to receive it."""
        pipes = {peer: self._pipe(peer, self._ranks.rank, tag) for peer in range(self._ranks.size)}
        found: list[int] = []

        def look() -> bool:
            self.advance()
            found[:] = [peer for peer, pipe in pipes.items() if pipe.filled and not pipe.waiting]
            return bool(found)

        others = [peer for peer in pipes if peer != self._ranks.rank]
        self._wait(look, others)
        return self.receive(tensor, found[0], tag)

    def advance(self) -> None:
        """Carry all transfers on as far as they get without waiting."""
        for pipe in self._pipes.values():
            pipe.advance()

    def finish(self, transfer: Transfer) -> None:
        """Wait for one transfer."""

        def look() -> bool:
            self.advance()
            return transfer.done

        self._wait(look, [transfer.peer])

    def _wait(self, look: Callable[[], bool], peers: list[int]) -> None:
        started = time.monotonic()

        def look_around() -> None:
            self._ranks.check()
            self._ranks.context.on_wait()
            names = [self._members[peer] for peer in peers]
            if all(map(self._segment.has_left, names)):
                self._segment.refuse_if_left(names[0], look)
            self._segment.refuse_if_late(names[0], started)

        wait_until(look, look_around)

    def _begin(self, pipe: Pipe, transfer: Transfer) -> Transfer:
        pipe.waiting.append(transfer)
        pipe.advance()
        return transfer

    def _pipe(self, sender: int, receiver: int, tag: int) -> Pipe:
        key = sender, receiver, tag
        if key not in self._pipes:
            path = self._path.with_name(f"{self._path.name}-{sender}-{receiver}-{tag}")
            self._pipes[key] = Pipe(path, self._segment.fence)
        return self._pipes[key]
