"""Imports that the workers of several calls share: one process imports, and each worker is forked from it.

They are shared where a forked process is as good as one that imports by itself. An import that leaves a thread, a
child, an open file, shared memory or a random generator is not: a fork loses the first two, and shares the others with
its siblings and with workers of later calls. Nor is one that has written a file, which belongs to one run.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nano_loop.distributed.files.private_files import private_imports

#: What tells a file from the same one after an edit; None where there is none.
Stamp = list[int] | None

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_BYTECODE = ".pyc"


class NotShareableError(Exception):
    """A process that is forked now would not be as good as one that imports by itself."""


def import_to_share(modules: Iterable[str], run: Path) -> dict[str, Stamp]:
    """Import modules in this process, from which workers are forked then.

    Parameters
    ----------
    modules : iterable of str
        Their names.
    run : pathlib.Path
        The private folder of the run that needs them first, where files that they write go.

    Returns
    -------
    dict of str to Stamp
        The files that the imports have read, with their stamps: where one differs later, so would the import.

    Raises
    ------
    NotShareableError
        If workers have to import by themselves.
    Exception
        What an import raises.
    """
    loaded, began = {*sys.modules}, time.time_ns()
    with private_imports(run) as files, warnings.catch_warnings(record=True):  # the caller has shown the warnings
        before = _what_forks_share()
        for name in modules:
            importlib.import_module(name)
        if files.has_written():
            raise NotShareableError("an import has written files")
        _end_threads_of_libraries()
        after = _what_forks_share()
        if after != before:
            raise NotShareableError(f"an import has left {[kind for kind in after if after[kind] != before[kind]]}")
        read = [path for path in files.read() if not path.endswith(_BYTECODE)]
    stamps = {path: stamp(path) for path in (*_sources({*sys.modules} - loaded), *read)}
    if any(value is not None and max(value) >= began for value in stamps.values()):
        raise NotShareableError("a file has changed while it was read")
    gc.collect()
    gc.freeze()  # so that the pages of what has been imported stay common to all workers
    return stamps


def stamp(path: str) -> Stamp:
    """Return the stamp of a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def are_unchanged(stamps: Mapping[str, Stamp]) -> bool:
    """Whether all files are as they were."""
    return all(stamp(path) == value for path, value in stamps.items())


def _sources(modules: Iterable[str]) -> list[str]:
    """Return the files that modules were loaded from.

    Raises
    ------
    NotShareableError
        If one is not a file, such as a part of an archive.
    """
    specs = [getattr(sys.modules.get(name), "__spec__", None) for name in modules]
    files = [str(spec.origin) for spec in specs if spec is not None and spec.has_location]
    if not all(map(os.path.isfile, files)):
        raise NotShareableError("an imported module is not a file")
    return files


def _end_threads_of_libraries() -> None:
    """End the threads of libraries that do so before a fork, and make them anew when they compute: OpenBLAS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _what_forks_share() -> dict[str, Any]:
    """Return what a forked process lacks of this one, or has in common with it, by its kind."""
    shared_maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "children": _has_children(),
        "open files": {*os.listdir("/proc/self/fd")},
        "shared memory": {place for place, permissions, *_ in shared_maps if permissions[1] + permissions[3] == "ws"},
        "generators": {
            id(value)
            for module in [*sys.modules.values()]
            for value in [*getattr(module, "__dict__", {}).values()]
            if isinstance(value, _GENERATORS) and type(value) is not random.SystemRandom
        },
    }


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True
