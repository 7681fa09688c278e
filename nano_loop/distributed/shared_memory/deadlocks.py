"""Detects ranks that wait for each other in different collectives, which none of them would ever leave.

A rank that has waited for a second writes to a shared file which rank it waits for, and counts there how often it has
checked in vain. Waiting ranks follow these notes from rank to rank. If they lead back to the start, each rank in the
cycle waits for one that cannot arrive: a deadlock.

A note may be slightly outdated: its rank may have received the data but not have run since. So a cycle only counts if
it is found a second time with the same notes, each of which has been counted up twice in between. The second of these
counts happened after all ranks of the cycle had started to wait.

A rank that is only late is an error of `nano_loop.distributed.shared_memory.shared_segment`.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nano_loop.distributed.comm.mismatch import CallSite

_LONG, _EVERY = 1.0, 0.05  # seconds: before a wait is recorded, and between counts
_LOOKS = 3  # index of the count in a note


class Note(NamedTuple):
    """A rank's record of a wait: its number, the rank it waits for, the number of checks, and its call site."""

    rank: int
    serial: int
    other: int
    looks: int
    what: str
    line: str


class Waits:
    """The waits of all ranks on a host, as one of them sees them, in their folder; only those in the loop's thread."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self._folder = folder
        self._thread = 0
        self._serial = 0
        self._usable = True
        self._is_there = False  # whether this rank's file exists

    def begin(self, other: int, what: str) -> Wait:
        """Begin a wait of this rank for rank `other` in a collective."""
        self._serial += 1
        return Wait(self, self._serial, other, what)

    def write_down(self, note: Note) -> bool:
        """Record a wait of this thread; return False if it cannot or should not be recorded."""
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            self._usable = False
            self.erase()
        if self._usable:
            try:
                self._write(note, "r+" if self._is_there else "w")
                self._is_there = True
            except OSError:  # no space, or the run has ended: a deadlock then ends by timeout
                self._usable = False
        return self._usable

    def erase(self) -> None:
        """Record that this rank no longer waits."""
        with suppress(OSError):
            self._write(None)

    def note_of(self, rank: int) -> Note | None:
        """Return a rank's record; None if it is not waiting, or has not waited long."""
        with suppress(OSError, ValueError):  # it is being written
            note = json.loads(self._path(rank).read_bytes().partition(b"\n")[0])
            return None if note is None else Note(*note)
        return None

    def _write(self, note: Note | None, mode: str = "r+") -> None:
        # Created only once, so that whoever deletes the folder finds no new file in it.
        with self._path(self.rank).open(mode) as file:
            file.write(json.dumps(note) + "\n")

    def _path(self, rank: int) -> Path:
        return self._folder / f"wait-{rank}"


class Wait:
    """A wait of this rank, with a unique `serial`, for another rank in the collective `what`."""

    def __init__(self, waits: Waits, serial: int, other: int, what: str) -> None:
        self._waits, self._what = waits, what
        self._note = Note(waits.rank, serial, other, 0, what, "")
        self._next = time.monotonic() + _LONG
        self._before: list[Note] = []

    def look(self) -> dict[int, CallSite]:
        """Return the call sites of ranks that wait for each other, on the lowest of them; empty without a deadlock."""
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + _EVERY
        line = self._note.line if self._note.looks else CallSite.of_this_rank(self._what).line
        self._note = self._note._replace(looks=self._note.looks + 1, line=line)
        if not self._waits.write_down(self._note):
            return {}
        ring = self._ring()
        if not (ring and self._waits.rank == min(ring).rank and self._found_before(ring)):
            return {}
        return {note.rank: CallSite(note.what, note.line) for note in sorted(ring)}

    def end(self) -> None:
        """Record that the wait is over."""
        if self._note.looks:
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
        """Whether the cycle was found before, and every rank in it has checked twice since."""
        before = self._before
        if [note[:_LOOKS] for note in before] != [note[:_LOOKS] for note in ring]:
            self._before = ring
            return False
        return all(now.looks >= then.looks + 2 for then, now in zip(before, ring, strict=True))
