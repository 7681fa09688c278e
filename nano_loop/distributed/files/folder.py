"""The folder of a run for what its workers write, made and deleted by rank 0; and the folders of caches."""

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

_LINK = "files"  # in the folder of the run, to this one


@contextlib.contextmanager
def workers_files(run: Path) -> Iterator[None]:
    """Make a folder on disk for what workers write, which may be large, and delete it on leaving.

    It lies in the folder of the run where others could replace it in that for temporary files.

    Parameters
    ----------
    run : Path
        The private folder of the run, in which the workers find it.
    """
    place = make_folder(f"nano_loop-{os.getpid()}-", (Path(tempfile.gettempdir()), run))
    try:
        (run / _LINK).symlink_to(os.path.realpath(place))
        yield
    finally:
        discard(place)


def place_of(run: Path) -> str:
    """Return the folder that `workers_files` has made for a run."""
    return os.readlink(run / _LINK)


def began(run: Path) -> int:
    """Return when `workers_files` has made it, in ns by the clock of the file systems."""
    return (run / _LINK).lstat().st_ctime_ns


def folders_of(run: Path) -> list[str]:
    """Return the folders of a run, whose files are no rank's own."""
    folders = [place_of(run), os.path.realpath(run)]
    return [*folders, *map(_being_deleted, folders)]


def discard_workers_files(run: Path, prefix: str) -> None:
    """Delete the folder that `workers_files` has made for a run of a process that was killed.

    Parameters
    ----------
    run : Path
        The private folder of the run.
    prefix : str
        What the name of the other one begins with, if it is such a folder.
    """
    with contextlib.suppress(OSError):  # it has none
        place = Path(place_of(run))
        if place.name.startswith(prefix):
            discard(place)


def discard(folder: str | Path) -> None:
    """Delete a folder, also one in which a process is still writing, or that a killed process was deleting."""
    gone = _being_deleted(folder)
    with contextlib.suppress(FileNotFoundError):
        original_os.rename(folder, gone)  # from now on nothing can be put into it by its path
    shutil.rmtree(gone, ignore_errors=True)


def _being_deleted(folder: str | Path) -> str:
    return f"{folder}.gone"


# --- cache folders, which several programs may write at the same time: workers use the caller's ---

# Of compilers, of downloads and of fonts.
_VARIABLES = (
    *("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR"),
    *("TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"),
    *("MPLCONFIGDIR", "NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX"),
)
_AT_HOME = ("~/.cache", "~/.triton", "~/.config/matplotlib")


def cache_folders() -> list[str]:
    """Return the cache folders of this process, without symbolic links in their paths.

    One that holds the working folder or the folder for temporary files is omitted: the loop's own files lie there.
    """
    place = working_folder()
    others = [os.path.realpath(folder) for folder in (place, tempfile.gettempdir()) if folder is not None]
    named = (os.path.expanduser(folder) for folder in _named())
    folders = (os.path.realpath(folder) for folder in named if place is not None or os.path.isabs(folder))
    return [folder for folder in folders if not any(f"{other}/".startswith(f"{folder}/") for other in others)]


@contextlib.contextmanager
def cache_folders_made() -> Iterator[list[str]]:
    """Make the missing cache folders, as Landlock knows only what exists; on leaving, remove those that are empty.

    Yields
    ------
    list of str
        The paths of what was made, each behind the folder that it lies in.
    """
    made: list[str] = []

    def make(folder: str) -> None:
        if not os.path.lexists(folder):
            make(os.path.dirname(folder))
            os.mkdir(folder, 0o700)
            made.append(folder)

    for folder in cache_folders():
        with contextlib.suppress(OSError):  # it cannot be made
            make(folder)
    try:
        yield made
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # somebody uses it
                os.rmdir(folder)


def working_folder() -> str | None:
    """Return that of this process; None where it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _named() -> Iterator[str]:
    yield from (os.environ[name] for name in _VARIABLES if os.environ.get(name))
    yield from filter(None, (*_AT_HOME, inductor_folder()))
    if sys.platform == "darwin":
        yield "~/Library/Caches"
