"""Finds ranks that wait for each other in different collectives, which none of them would ever leave.

A rank that has waited for a second writes down in a file that all see for whom it waits, and counts there how often it
has found the other still missing. A rank that waits follows these notes from rank to rank. Where they lead back to it,
each rank in the ring waits for one that cannot come: a deadlock.

A note may be a little old: its rank may have got what it waits for and not have run since. So a ring counts only if it
is found a second time, with the same notes, each of which has been counted on twice in between. The second of these
counts came after the ranks of the ring had all begun to wait.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nano_loop.distributed.comm.mismatch import CallSite

_LONG, _EVERY = 1.0, 0.05  # seconds: before a wait is written down, and between counts
_LOOKS = 3  # where in a note they are


class Note(NamedTuple):
    """A rank's note of a wait: its number, the rank waited for, how often that was missing, and where the rank is."""

    rank: int
    serial: int
    other: int
    looks: int
    what: str
    line: str


class Waits:
    """The waits of all ranks of a host, as one of them sees them.

    Waits of one thread are written down, that of the loop. Where a rank waits in two, one of them may let another rank
    go on, so none of its waits is written down any more.

    Parameters
    ----------
    rank : int
        This rank.
    folder : pathlib.Path
        Their private folder, in shared memory.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self._folder = folder
        self._thread = 0
        self._serial = 0
        self._usable = True
        self._is_there = False  # whether this rank has a file

    def begin(self, other: int, what: str) -> Wait:
        """Return the wait that this rank begins, for rank `other` in a collective."""
        self._serial += 1
        return Wait(self, self._serial, other, what)

    def write_down(self, note: Note) -> bool:
        """Write down a wait of this thread; return False where it cannot be, or is not to be."""
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            self._usable = False
            self.erase()
        if self._usable:
            try:
                self._write(note, os.O_CREAT * (not self._is_there))
                self._is_there = True
            except OSError:  # no room, or the run has ended: a deadlock then ends with the timeout
                self._usable = False
        return self._usable

    def erase(self) -> None:
        """Note that this rank waits no more."""
        with suppress(OSError):
            self._write(None)

    def note_of(self, rank: int) -> Note | None:
        """Return what a rank has written down; None if it does not wait, or not for long."""
        with suppress(OSError, ValueError):  # it is being written
            note = json.loads(self._path(rank).read_bytes().partition(b"\n")[0])
            return None if note is None else Note(*note)
        return None

    def _write(self, note: Note | None, flags: int = 0) -> None:
        # The file is made once: whoever deletes the folder finds no new one in it.
        descriptor = os.open(self._path(self.rank), os.O_WRONLY | flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # whatever the umask
            os.write(descriptor, json.dumps(note).encode() + b"\n")
        finally:
            os.close(descriptor)

    def _path(self, rank: int) -> Path:
        return self._folder / f"wait-{rank}"


class Wait:
    """One wait of this rank for another.

    Parameters
    ----------
    waits : Waits
        Of this rank.
    serial : int
        No other wait of this rank has it.
    other : int
        For which rank it waits.
    what : str
        In which collective.
    """

    def __init__(self, waits: Waits, serial: int, other: int, what: str) -> None:
        self._waits, self._what = waits, what
        self._note = Note(waits.rank, serial, other, 0, what, "")
        self._next = time.monotonic() + _LONG
        self._before: list[Note] = []

    def look(self) -> dict[int, CallSite]:
        """Return the ranks that wait for each other, and where; empty if there is no deadlock.

        It is called again and again, each time after the other rank was found missing. Only the lowest rank of a ring
        gets it, so that the run ends with one error.
        """
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
        """Note that the wait is over."""
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
        """Whether the ring was there before, and every rank in it has looked twice since."""
        before = self._before
        if [note[:_LOOKS] for note in before] != [note[:_LOOKS] for note in ring]:
            self._before = ring
            return False
        return all(now.looks >= then.looks + 2 for then, now in zip(before, ring, strict=True))
