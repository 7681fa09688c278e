"""Cache folders that several programs may write at the same time: workers use the caller's."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from nano_loop.storage.cache_folder import inductor_folder

# Of compilers, of downloads and of fonts.
_VARIABLES = (
    *("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR"),
    *("TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"),
    *("MPLCONFIGDIR", "NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX"),
)
_AT_HOME = ("~/.cache", "~/.triton", "~/.config/matplotlib")


def cache_folders() -> list[str]:
    """Return the cache folders of this process, without symbolic links in their paths.

    One that holds the working folder or the folder for temporary files is left out: the loop's own files lie there.
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
