"""The real folders that ranks other than 0 make in a run: rank 0 may make them again, and unwanted ones are removed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

from nano_loop.distributed.files.originals import lower, real

# Links that note a folder which a rank has made, and one which it has removed again.
_MADE, _REMOVED_AGAIN, _MARK = "made-", "removed-", ".folder"


class MadeFolders:
    """The real folders that ranks other than 0 have made in a run, as links in the folder of the run."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def note(self, key: str) -> bool:
        """Note that this rank makes a folder; return whether no rank has before."""
        with contextlib.suppress(OSError):  # noted already, or the run's folder is gone
            real.symlink(key, self._mark(key))
            return True
        return False

    def forget(self, key: str) -> None:
        """Take back what `note` has noted, and no earlier note that a rank wants the folder no more."""
        with contextlib.suppress(OSError):
            real.unlink(self._mark(key))

    def make_for_the_run(self, key: str) -> None:
        """Make a folder that goes with the run, with those above it, where it is empty then."""
        if lower(key) is None:
            self.make_for_the_run(os.path.dirname(key))
            with contextlib.suppress(OSError):
                real.mkdir(key, 0o700)
                real.symlink(key, self._mark(key, _REMOVED_AGAIN))

    def note_removed(self, key: str) -> None:
        """Note that a rank which has made a folder wants it no more."""
        with contextlib.suppress(OSError):
            real.rename(self._mark(key), self._mark(key, _REMOVED_AGAIN))

    def claim(self, path: Any) -> bool:
        """Count an existing folder as made by rank 0 if another rank has made it; return whether one has."""
        claimed, key = False, os.path.realpath(os.fsdecode(path))
        for kind in (_MADE, _REMOVED_AGAIN):
            with contextlib.suppress(OSError):
                real.unlink(self._mark(key, kind))
                claimed = True
        return claimed

    def clean(self) -> None:
        """Remove the folders that no rank wants, where they are empty; the innermost first."""
        marks = self._run.glob(f"{_REMOVED_AGAIN}*{_MARK}")
        for key in sorted(map(os.readlink, marks), reverse=True):
            with contextlib.suppress(OSError):  # rank 0 has it
                real.rmdir(key)

    def _mark(self, key: str, kind: str = _MADE) -> Path:
        digest = hashlib.sha1(os.fsencode(key), usedforsecurity=False).hexdigest()
        return self._run / f"{kind}{digest}{_MARK}"
