"""Checkpoints of a run with workers: rank 0 alone writes files, and a worker that reads one back waits for rank 0.

Several processes that write one file destroy it. So `torch.save` to a file does nothing in a worker. The common loop
that saves its best model, and loads it when it is through, would then find no file, or half of one, in a worker that
gets there first: rank 0 notes in the run's folder what it has saved, and workers look there.
"""

from __future__ import annotations

import functools
import io
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from nano_loop.distributed.ranks import wait_until
from nano_loop.errors import NanoError, problem
from nano_loop.intercept.attributes import replaced

_NOTES = "checkpoints"  # a line for each file that rank 0 has saved, and for each that it is about to load
_Function = Callable[..., Any]


# --- rank 0 ---


@contextmanager
def checkpoints_noted(folder: Path) -> Iterator[None]:
    """Let rank 0 note in `folder`, which the ranks have in common, what `torch.save` and `torch.load` do to files."""
    with (folder / _NOTES).open("ab", buffering=0) as notes:

        def note(what: str, file: Any) -> None:
            if _is_path(file):
                notes.write((json.dumps([what, _key(file)]) + "\n").encode())

        with (
            replaced(cast(Any, torch), "save", lambda original: _noted_after(original, note)),
            replaced(cast(Any, torch), "load", lambda original: _noted_before(original, note)),
        ):
            yield


def _noted_after(original: _Function, note: Callable[[str, Any], None]) -> _Function:
    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        original(obj, f, *args, **kwargs)
        note("saved", f)

    return save


def _noted_before(original: _Function, note: Callable[[str, Any], None]) -> _Function:
    @functools.wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        note("loads", f)
        return original(f, *args, **kwargs)

    return load


# --- workers ---


def save_memory_alone() -> None:
    """Let `torch.save` write to a `io.BytesIO`, which tensors are pickled through as well, and nowhere else.

    For as long as this process lives, under both of its names: a function that has travelled finds it by the second.
    """
    torch.save = torch.serialization.save = _saving(torch.save, lambda file: None)


class Checkpoints:
    """The files that a worker has left to rank 0 to save.

    Parameters
    ----------
    folder : Path
        That of `checkpoints_noted`.
    timeout : float
        Seconds that a `torch.load` waits for rank 0.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        self._notes = folder / _NOTES
        self._timeout = timeout
        self._left: Counter[str] = Counter()  # saves that did nothing here, by file
        self._loaded: Counter[str] = Counter()

    def begin(self) -> None:
        """Count what the loop saves from now on, and let `torch.load` wait for it.

        To be called after the modules of the loop have been imported: what one of them has imported from torch by
        name does not count on rank 0, and must not here.
        """
        torch.save = _saving(torch.save, self._leave)
        torch.load = self._loading(torch.load)

    def _leave(self, file: Any) -> None:
        if _is_path(file):
            self._left[_key(file)] += 1

    def _loading(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_path(f):
                self._await(_key(f))
            return original(f, *args, **kwargs)

        return load

    def _await(self, file: str) -> None:
        """Wait until rank 0 has saved the file as often as this rank has wanted to, or loads what there is itself."""
        deadline = time.monotonic() + self._timeout

        def check() -> None:
            if time.monotonic() > deadline:
                given = f"a worker loads {file}, which rank 0 has not saved within {self._timeout:g} s"
                raise NanoError(problem(given, "only rank 0 saves", "Make every rank save and load at the same steps"))

        wait_until(lambda: not self._left[file] or self._is_there(file), check)
        self._loaded[file] += 1

    def _is_there(self, file: str) -> bool:
        done = Counter(line for line in self._notes.read_bytes().splitlines())
        saved, loads = (done[json.dumps([what, file]).encode()] for what in ("saved", "loads"))
        return saved >= self._left[file] or loads > self._loaded[file]


def _saving(original: _Function, leave: Callable[[Any], None]) -> _Function:
    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, io.BytesIO):
            original(obj, f, *args, **kwargs)
        else:
            leave(f)

    return save


# --- both ---


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike))


def _key(file: Any) -> str:
    return os.path.abspath(os.fsdecode(file))
