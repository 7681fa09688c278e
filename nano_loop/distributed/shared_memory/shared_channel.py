"""The channel between ranks of one host: byte streams through shared memory.

Every collective is an exchange: each rank has a byte stream, possibly empty, and all streams advance by one piece at a
time. A rank copies a piece into one of its two slots, increments its counter, waits until all others have counted as
many, and reads their slots. It overwrites a slot two pieces later. By then all others have counted the piece in
between, which they do after reading this one, so one counter per rank is sufficient.

Each piece has a mark that identifies the rank's operation, so that ranks detect mismatches. A rank also reports whether
it has written what may be its shard of the caller's files: these are moved, followed by another barrier.
"""

from __future__ import annotations

import threading
import zlib
from functools import partial
from pathlib import Path

from nano_loop.distributed.comm.mismatch import CallSite, mismatch_message
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.raw_bytes import raw_bytes
from nano_loop.distributed.files.private_files import shards
from nano_loop.distributed.shared_memory.shared_file import map_by_name
from nano_loop.distributed.shared_memory.shared_segment import SharedSegment
from nano_loop.errors import NanoError

_PIECE = 1 << 17  # bytes; two slots per rank fit into a cache
_POSTED = 0  # index of the counter
_LENGTHS, _MARKS, _FILES = 1, 3, 5  # the words after it, two each


class SharedChannel:
    """A `Channel` of one host's ranks, through a file in their folder that all map. The constructor is collective."""

    def __init__(self, ranks: Ranks, folder: Path, name: str = "channel", *, piece: int = _PIECE) -> None:
        path = folder / name
        self._ranks = ranks
        self._piece = piece
        self._steps = 0
        # The number of possible shards written by this rank, now and at the last move.
        self._files = self._files_before = 0
        self._moves = False  # whether any rank has written one
        self._lock = threading.RLock()
        try:
            self.segment = SharedSegment(ranks, 1, 2 * ranks.size * piece, partial(map_by_name, path))
            self._posted = self.segment.places(_POSTED)
            self._memory = raw_bytes(self.segment.memory)
            starts = [slice(start, start + piece) for start in range(0, 2 * ranks.size * piece, piece)]
            slots = [self._memory[start] for start in starts]
            self._slots = slots[: ranks.size], slots[ranks.size :]  # of all ranks, for every other piece
            self.exchange(b"", "barrier")  # all have mapped it
        finally:
            if ranks.rank == 0:
                path.unlink(missing_ok=True)

    def exchange(self, data: bytes | memoryview, what: str) -> list[bytearray]:
        """See `Channel.exchange`."""
        with self._lock:
            self.segment.begin()
            self._files, self._moves = shards().latest, False
            stream, piece = memoryview(data), self._piece
            lengths = self._exchange_piece(what, stream[:piece], len(stream))
            # A slice ends with the slot, or with the stream.
            received = [bytearray(slot[:length]) for slot, length in zip(self._current, lengths, strict=True)]
            for start in range(piece, max(lengths), piece):
                self._exchange_piece(what, stream[start : start + piece], len(stream))
                for buffer, slot, length in zip(received, self._current, lengths, strict=True):
                    buffer += slot[: max(length - start, 0)]
            if self._moves:
                shards().move(self._files_before)
                self._files_before = self._files
                self._exchange_piece("files", memoryview(b""), 0)
            self.segment.end()
            return received

    def leave(self, *, returned: bool) -> None:
        """Announce that this rank exchanges nothing more; see `SharedSegment.leave`."""
        self.segment.leave(returned=returned)

    def close(self) -> None:
        """Release the memory."""
        for slot in (*self._slots[0], *self._slots[1], self._memory):
            slot.release()
        self.segment.close()

    @property
    def _current(self) -> list[memoryview]:
        """The slots of all ranks for the current piece."""
        return self._slots[self._steps % 2]

    def _exchange_piece(self, what: str, piece: memoryview, length: int) -> list[int]:
        """Exchange the next piece of this rank's stream through its slot; return the lengths of all streams."""
        words, own_place, mark = self.segment.words, self._posted[self._ranks.rank], zlib.crc32(what.encode())
        self._steps += 1
        turn = self._steps % 2
        self._current[self._ranks.rank][: len(piece)] = piece
        words[own_place + _LENGTHS + turn], words[own_place + _MARKS + turn] = length, mark
        words[own_place + _FILES + turn] = self._files > self._files_before
        self.segment.publish(own_place, self._steps)
        self.segment.wait(self._posted, self._steps, what)
        if any(words[place + _MARKS + turn] != mark for place in self._posted):  # detected by all ranks
            own_site = memoryview(CallSite.of_this_rank(what).pack()[: self._piece])
            lengths = self._exchange_piece("call sites", own_site, len(own_site))
            sites = {name: bytes(self._current[rank][: lengths[rank]]) for rank, name in enumerate(self._ranks.names)}
            by_name = {name: CallSite.unpack(site) for name, site in sites.items()}
            raise NanoError(mismatch_message(self._ranks.names[self._ranks.rank], by_name))
        self._moves = self._moves or any(words[place + _FILES + turn] for place in self._posted)
        return [words[place + _LENGTHS + turn] for place in self._posted]
