"""The shared libraries that matter here: allocators and OpenMP runtimes, loaded into a process or on the disk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

#: Whose OpenMP runtime each library is.
OPENMP = {"libgomp": "GNU", "libiomp5": "Intel", "libomp": "LLVM"}

_NAME = re.compile(r"^(lib\w+?)(?:[-.].*)?$")


def openmp_of(libraries: Iterable[str]) -> tuple[str, ...]:
    """Return whose OpenMP runtimes are among libraries, sorted."""
    matches = (_NAME.match(Path(library).name) for library in libraries)
    return tuple(sorted({OPENMP[match[1]] for match in matches if match and match[1] in OPENMP}))


def preloaded(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the entries of ``LD_PRELOAD``, which colons or spaces separate."""
    return tuple(filter(None, re.split(r"[: \t\n]+", environ.get("LD_PRELOAD", ""))))


def find_library(stem: str, environ: Mapping[str, str], prefix: str, root: Path | str = "/") -> str | None:
    """Return the absolute path of a library such as ``libjemalloc``, or None.

    Relative folders are left out: from another working folder, they would lead to another library.

    Parameters
    ----------
    stem : str
        The name up to ``.so``.
    environ : mapping
        The environment, whose ``LD_LIBRARY_PATH`` and ``CONDA_PREFIX`` are searched.
    prefix : str
        The folder of this Python's environment, which is searched first: pip and conda install libraries there.
    root : str or pathlib.Path
        The folder of the system's own folders: ``/`` on a live machine.
    """
    tops = ("usr/local/lib", "usr/lib64", "usr/lib", "lib64", "lib")
    folders = [Path(prefix, "lib")]
    folders += [Path(environ["CONDA_PREFIX"], "lib")] if environ.get("CONDA_PREFIX") else []
    folders += map(Path, filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")))
    folders += [path for top in tops for path in (Path(root, top), *sorted(Path(root, top).glob("*-linux-gnu*")))]
    for folder in filter(Path.is_absolute, folders):
        # LD_PRELOAD could not name a path with spaces. The shortest name is the one that links to the newest version.
        matching = [path for path in folder.glob(f"{stem}.so*") if re.fullmatch(r"[^: \t\n]+\.so(\.\d+)*", str(path))]
        if existing := [str(path) for path in matching if path.exists()]:
            return min(existing, key=lambda path: (len(path), path))
    return None
