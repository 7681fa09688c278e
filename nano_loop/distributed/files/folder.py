"""The folder of a run for files written by workers, managed by rank 0; and the cache folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nano_loop.distributed.files.original_os import original_os
from nano_loop.storage.cache_folder import inductor_folder
from nano_loop.storage.trusted_files import make_folder

_LINK = "files"  # in the folder of the run, pointing to this one


@contextlib.contextmanager
def workers_files(run: Path) -> Iterator[None]:
    """Create a folder for workers' files on disk, or in the run's if others could replace it; delete it on exit."""
    place = make_folder(f"nano_loop-{os.getpid()}-", (Path(tempfile.gettempdir()), run))
    try:
        (run / _LINK).symlink_to(os.path.realpath(place))
        yield
    finally:
        discard(place)


def place_of(run: Path) -> str:
    """Return the folder that `workers_files` has created for a run."""
    return os.readlink(run / _LINK)


def began(run: Path) -> int:
    """Return the time when `workers_files` created it, in ns by the file system clock."""
    return (run / _LINK).lstat().st_ctime_ns


def folders_of(run: Path) -> list[str]:
    """Return the folders of a run, whose files all ranks share."""
    folders = [place_of(run), os.path.realpath(run)]
    return [*folders, *map(_being_deleted, folders)]


def discard_workers_files(run: Path, prefix: str) -> None:
    """Delete the folder that `workers_files` made for a killed process's run, if its name has the prefix."""
    with contextlib.suppress(OSError):  # there is none
        place = Path(place_of(run))
        if place.name.startswith(prefix):
            discard(place)


def discard(folder: str | Path) -> None:
    """Delete a folder, even if a process is still writing to it, or a killed process was deleting it."""
    gone = _being_deleted(folder)
    with contextlib.suppress(FileNotFoundError):
        original_os.rename(folder, gone)  # from now on, its path cannot be used to add files
    shutil.rmtree(gone, ignore_errors=True)


def _being_deleted(folder: str | Path) -> str:
    return f"{folder}.gone"


# # --- cache folders, which several programs may write concurrently: workers use the caller's ---

# For compilers, downloads and fonts.
_VARIABLES = (
    *("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR"),
    *("TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"),
    *("MPLCONFIGDIR", "NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX"),
)
_AT_HOME = ("~/.cache", "~/.triton", "~/.config/matplotlib")


def cache_folders() -> list[str]:
    """Return the resolved cache folders, but none with the working or temporary folder: the loop's files are there."""
    place = working_folder()
    others = [os.path.realpath(folder) for folder in (place, tempfile.gettempdir()) if folder is not None]
    named = (os.path.expanduser(folder) for folder in _named())
    folders = (os.path.realpath(folder) for folder in named if place is not None or os.path.isabs(folder))
    return [folder for folder in folders if not any(f"{other}/".startswith(f"{folder}/") for other in others)]


@contextlib.contextmanager
def cache_folders_made() -> Iterator[list[str]]:
    """Create the missing cache folders, as Landlock requires, and yield them; on exit, remove the empty ones."""
    made: list[str] = []

    def make(folder: str) -> None:
        if not os.path.lexists(folder):
            make(os.path.dirname(folder))
            os.mkdir(folder, 0o700)
            made.append(folder)

    for folder in cache_folders():
        with contextlib.suppress(OSError):  # it cannot be created
            make(folder)
    try:
        yield made
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # it is in use
                os.rmdir(folder)


def working_folder() -> str | None:
    """Return the working folder of this process; None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _named() -> Iterator[str]:
    yield from (os.environ[name] for name in _VARIABLES if os.environ.get(name))
    yield from filter(None, (*_AT_HOME, inductor_folder()))
    if sys.platform == "darwin":
        yield "~/Library/Caches"
