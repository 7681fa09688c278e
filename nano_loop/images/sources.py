"""The source of a Pillow image whose pixels nobody has touched yet: a file in a certain state."""

from __future__ import annotations

import io
import os
import time
from typing import Any, NamedTuple

#: Seconds. A file that was changed less than this ago may change again without a change of its time.
SETTLED = 2.0
#: Formats whose images say whether they are loaded, by their list of tiles.
_FORMATS = ("JPEG", "MPO", "PNG", "BMP", "PPM")
#: The class of files. By its name, since ranks in processes that nano_loop starts have another object as `io.FileIO`.
_FILES = ("_io", "FileIO")
_ATTRIBUTE = "_nano_loop_source"


class FileState(NamedTuple):
    """A file and its state. Another file at the same path has another inode or another time of change."""

    path: str
    inode: int
    size: int
    modified: int
    changed: int

    @property
    def is_settled(self) -> bool:
        """Whether a later change of the file will show in its times."""
        return time.time() - max(self.modified, self.changed) / 1e9 > SETTLED


def file_state(file: Any) -> FileState | None:
    """Return the state of an open file; None for what is not a whole file with a path."""
    raw = file.raw if type(file) is io.BufferedReader else file
    if (type(raw).__module__, type(raw).__name__) != _FILES or not isinstance(file.name, str) or file.closed:
        return None
    return _state(os.path.abspath(file.name), os.fstat(file.fileno()))


def is_in_state(state: FileState) -> bool:
    """Whether the file at the path is still the same, in the same state."""
    try:
        return _state(state.path, os.stat(state.path)) == state
    except OSError:
        return False


def _state(path: str, status: os.stat_result) -> FileState:
    return FileState(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Source:
    """The file of an image that `PIL.Image.open` has returned and that is not loaded yet.

    `is_own` says whether Pillow has opened the file, and not the program.
    """

    def __init__(self, image: Any, state: FileState, is_own: bool) -> None:
        self.state = state
        self.is_own = is_own
        self._seen = _header(image)

    def is_untouched(self, image: Any) -> bool:
        """Whether the image is still as it was opened: not loaded, and in the same size, mode and frame."""
        return image.fp is not None and _header(image) == self._seen


def _header(image: Any) -> tuple[Any, ...]:
    return image.mode, image.size, list(image.tile)


def remember(image: Any, state: FileState | None, is_own: bool) -> None:
    """Note the file of an image that was just opened; see `Source`."""
    if state is not None and image.format in _FORMATS:
        setattr(image, _ATTRIBUTE, Source(image, state, is_own))


def source_of(image: Any) -> Source | None:
    """Return what an image was opened from, if its pixels are still those of the file; None if that is not known."""
    source: Source | None = vars(image).get(_ATTRIBUTE)
    return source if source is not None and source.is_untouched(image) else None
