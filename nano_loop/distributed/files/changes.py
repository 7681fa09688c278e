"""Which files a worker has changed, known alike to the processes that it forks, such as those of a `DataLoader`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final

from nano_loop.distributed.files.originals import real

PRIVATE: Final = 1  # the worker has made it, or has a copy of the caller's
SHOWN_THROUGH: Final = 2  # a folder of the caller's in which the worker has changed something
#: One of these two, or the identity of a file of the caller's that the worker has removed.
Change = Any
_NONE = -1  # a descriptor that is none


class Changes:
    """A mapping from paths to what a worker has done there.

    Each change is a line in a file, which a process that shares the mapping with others reads on from where it was.

    There is none before `begin`.

    Attributes
    ----------
    active : bool
        Whether there may be any change: where it is false, nothing need be looked up.
    shared : bool
        Whether other processes may add changes.
    """

    def __init__(self) -> None:
        self._journal = _NONE
        self._read = 0
        self._known: dict[str, Change] = {}
        self.shared = False
        self.active = False

    def begin(self, journal: str) -> None:
        """Note changes from now on, in a file of this path, which is made."""
        self._journal = real.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def share(self) -> None:
        """Look for changes of other processes from now on, since this one has forked or been forked."""
        if self._journal == _NONE:
            return
        if not self.shared:  # so far nobody else has changed anything
            self._read = os.fstat(self._journal).st_size
        self.shared = self.active = True

    def refresh(self) -> bool:
        """Take in what other processes have changed; return whether there was any."""
        if not self.shared or os.fstat(self._journal).st_size == self._read:
            return False
        content = os.pread(self._journal, os.fstat(self._journal).st_size - self._read, self._read)
        complete = content[: content.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            self._note(*json.loads(line))
        return bool(complete)

    def get(self, path: str) -> Change | None:
        """Return what was done at a path, or None."""
        return self._known.get(path)

    def set(self, path: str, change: Change | None) -> None:
        """Note a change; None takes it back."""
        if self._known.get(path) == change:
            return
        self.active = True
        self._note(path, change)
        os.write(self._journal, json.dumps([path, change]).encode() + b"\n")

    def under(self, path: str) -> Iterator[tuple[str, Change]]:
        """Yield what was done at a path and below it."""
        below = path + "/"
        return iter([(each, what) for each, what in self._known.items() if each == path or each.startswith(below)])

    def __bool__(self) -> bool:
        return bool(self._known)

    def _note(self, path: str, change: Change | None) -> None:
        if change is None:
            self._known.pop(path, None)
        else:
            self._known[path] = change
