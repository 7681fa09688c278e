"""Finds ranks that wait for each other in different collectives, which none of them would ever leave.

A rank that has waited for a second writes down in memory that all see for whom it waits, and counts there how often it
has found the other still missing. A rank that waits follows these notes from rank to rank. Where they lead back to it,
each rank in the ring waits for one that cannot come: a deadlock.

A note may be a little old: its rank may have got what it waits for and not have run since. So a ring counts only if it
is found a second time, with the same notes, each of which has been counted on twice in between. The second of these
counts came after the ranks of the ring had all begun to wait.
"""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from typing import NamedTuple

from nano_loop.distributed.comm.mismatch import CallSite
from nano_loop.distributed.shared_memory.shared_file import make_at_once, map_whole

_FILE = "waits"
_RECORD = 1024  # bytes of a rank's note: words, and behind them its call site
_WORD = 8
_SERIAL, _COUNT, _OTHER, _LENGTH, _WORDS = range(5)
_LONG, _EVERY = 1.0, 0.05  # seconds: before a wait is written down, and between counts


class Waits:
    """The waits of all ranks of a host, as one of them sees them.

    Waits of one thread are written down, that of the loop. Where a rank waits in two, one of them may let another rank
    go on, so none of its waits is written down any more.

    Parameters
    ----------
    rank, size : int
        This rank, and how many there are.
    folder : pathlib.Path
        Their private folder, in shared memory.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank = rank
        self._size = size
        self._path = folder / _FILE
        self._memory: mmap.mmap | None = None
        self._words = memoryview(b"").cast("q")
        self._thread = 0
        self._serial = 0
        self._usable = True

    def begin(self, other: int, what: str) -> Wait:
        """Return the wait that this rank begins, for rank `other` in a collective."""
        return Wait(self, other, what)

    def write_down(self, other: int, what: str) -> bool:
        """Write down a wait of this thread; return False where it cannot be, or is not to be."""
        if not self._is_usable():
            return False
        assert self._memory is not None
        first, start = self.rank * _RECORD // _WORD, self.rank * _RECORD + _WORDS * _WORD
        text = CallSite.of_this_rank(what).pack()[: _RECORD - _WORDS * _WORD]
        self._memory[start : start + len(text)] = text
        self._serial += 1
        self._words[first + _OTHER], self._words[first + _LENGTH] = other, len(text)
        self._words[first + _SERIAL] = self._serial
        return True

    def count(self) -> None:
        """Note that this rank still waits."""
        self._words[self.rank * _RECORD // _WORD + _COUNT] += 1

    def erase(self) -> None:
        """Note that this rank waits no more."""
        self._words[self.rank * _RECORD // _WORD + _SERIAL] = 0

    def note_of(self, rank: int) -> Note | None:
        """Return what a rank has written down; None if it does not wait, or not for long."""
        first = rank * _RECORD // _WORD
        serial, count, other = self._words[first : first + _LENGTH]
        return Note(rank, serial, other, count) if serial and 0 <= other < self._size else None

    def call_site_of(self, rank: int) -> CallSite:
        """Return where a rank waits that has written it down."""
        assert self._memory is not None
        length = self._words[rank * _RECORD // _WORD + _LENGTH]
        start = rank * _RECORD + _WORDS * _WORD
        return CallSite.unpack(self._memory[start : start + length])

    def _is_usable(self) -> bool:
        if self._memory is None:
            self._thread = threading.get_ident()
            self._open()
        elif self._thread != threading.get_ident():
            self._usable = False
            self.erase()
        return self._usable

    def _open(self) -> None:
        nbytes = self._size * _RECORD
        try:
            make_at_once(str(self._path), nbytes)
            self._memory = map_whole(str(self._path), nbytes)
        except OSError:  # no room, or the run has ended: a deadlock then ends with the timeout
            self._memory, self._usable = mmap.mmap(-1, nbytes), False
        self._words = memoryview(self._memory).cast("q")


class Note(NamedTuple):
    """A rank's note of a wait: its number, the rank waited for, and how often that rank was missing."""

    rank: int
    serial: int
    other: int
    looks: int


class Wait:
    """One wait of this rank for another.

    Parameters
    ----------
    waits : Waits
        Of this rank.
    other : int
        For which rank it waits.
    what : str
        In which collective.
    """

    def __init__(self, waits: Waits, other: int, what: str) -> None:
        self._waits, self._other, self._what = waits, other, what
        self._next = time.monotonic() + _LONG
        self._written = self._tried = False
        self._before: list[Note] = []

    def look(self) -> dict[int, CallSite]:
        """Return the ranks that wait for each other, and where; empty if there is no deadlock.

        It is called again and again, each time after the other rank was found missing. Only the lowest rank of a ring
        gets it, so that the run ends with one error.
        """
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + _EVERY
        if not self._tried:
            self._tried = True
            self._written = self._waits.write_down(self._other, self._what)
        if not self._written:
            return {}
        self._waits.count()
        ring = self._ring()
        if not (ring and self._waits.rank == min(ring).rank and self._found_before(ring)):
            return {}
        return {note.rank: self._waits.call_site_of(note.rank) for note in sorted(ring)}

    def end(self) -> None:
        """Note that the wait is over."""
        if self._written:
            self._waits.erase()

    def _ring(self) -> list[Note]:
        """Return the notes that lead from this rank back to it; empty if they lead elsewhere."""
        ring: list[Note] = []
        rank = self._waits.rank
        while rank not in {earlier.rank for earlier in ring}:
            note = self._waits.note_of(rank)
            if note is None:
                return []
            ring.append(note)
            rank = note.other
        return ring if rank == self._waits.rank else []

    def _found_before(self, ring: list[Note]) -> bool:
        """Whether the ring was there before, and every rank in it has looked twice since."""
        before = self._before
        if [note[:_LOOKS] for note in before] != [note[:_LOOKS] for note in ring]:
            self._before = ring
            return False
        return all(now.looks >= then.looks + 2 for then, now in zip(before, ring, strict=True))


_LOOKS = 3  # where in a note they are
