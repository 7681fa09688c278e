"""The facts of `doctor`: the machine, the limits of this process, its kernels, its packages and its environment.

Reading them does not import torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nano_loop.config.environment import kernels_choice
from nano_loop.cpu import Machine, memory_left, read_machine
from nano_loop.cpu.cgroup import read_cpuset, read_memory_limit
from nano_loop.cpu.reading import Host, live_host
from nano_loop.cpu.tree import Tree
from nano_loop.errors import NanoConfigError, NanoError
from nano_loop.kernels.compiler import (
    OPENMP,
    SOURCES,
    UnavailableError,
    chosen_level,
    compile_library,
    compiler_command,
    damage_of,
    library_name,
    packaged,
)
from nano_loop.storage.cache_folder import cache_path
from nano_loop.storage.trusted_files import opened_folder

#: The packages whose versions must fit together, by their distribution names.
PACKAGES = (
    *("nano-loop", "torch", "intel-extension-for-pytorch", "lightning", "pytorch-lightning", "lightning-fabric"),
    "ray",
)
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Memory:
    """The memory in bytes; None if unknown."""

    #: The memory of the machine, and the part that is available.
    total: int | None = None
    available: int | None = None
    limit: int | None = None  # the limit of the process's cgroups; None if there is none
    left: Mapping[str, int] = field(default_factory=dict)  # what this process may still use, by the kind of limit
    shared: int | None = None  # the size of the file system for shared memory


class Kernels(NamedTuple):
    """The kernels in C that a run would use."""

    level: str | None  # None if there are none
    origin: str = ""  # where they come from
    reason: str = ""  # why some or all are missing
    output: str = ""  # the output of a compiler that failed


class CacheFolder(NamedTuple):
    """The cache folder, or the place where it would be created."""

    path: str  # empty for a user without a home folder
    is_writable: bool  # by this user only; otherwise the folder is not used
    is_executable: bool  # whether libraries in it can be loaded (the mount is not noexec)
    is_there: bool = True  # whether the folder or its parent exists


@dataclass(frozen=True)
class Inspected:
    """All facts that the checks read."""

    machine: Machine  # the machine, and the part of it that this process may use
    affinity: frozenset[int] | None = None  # the CPUs of the affinity mask; None if there are no masks
    cpuset: tuple[int, ...] = ()  # the CPUs of the cgroup; empty if there is no cpuset
    memory: Memory = field(default_factory=Memory)
    environ: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)  # the versions of the installed packages in `PACKAGES`
    #: The kernels in C; None if they are not known, as on a recorded machine.
    kernels: Kernels | None = None
    cache: CacheFolder | None = None  # None as on a recorded machine


def inspect_system(
    root: Path | str = "/", environ: Mapping[str, str] = os.environ, host: Host | None = None
) -> Inspected:
    """Return the facts about this process and a machine: the live one at ``/``, or one recorded at another root."""
    tree = Tree(root)
    is_live = Path(root) == Path("/")
    if host is None:
        host = live_host() if is_live else Host()
    machine = read_machine(root, host=host)
    return Inspected(
        machine=machine,
        affinity=host.affinity,
        cpuset=read_cpuset(tree),
        memory=_read_memory(tree, is_live),
        environ=environ,
        packages=installed(),
        kernels=inspect_kernels(environ, machine.instruction_sets) if is_live else None,
        cache=inspect_cache() if is_live else None,
    )


def installed() -> dict[str, str]:
    """Return the versions of the installed packages in `PACKAGES`."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def inspect_kernels(environ: Mapping[str, str], instruction_sets: Collection[str]) -> Kernels | None:
    """Return the kernels of a CPU, for whose lack a test file is compiled; None for an invalid choice of them."""
    try:
        level = chosen_level(kernels_choice(environ), instruction_sets)
        file, cache = library_name(OPENMP, level), cache_path()
        if packaged(file).exists():
            libraries = [packaged(library_name(source.stem, level)) for source in sorted(SOURCES.glob("*.c"))]
            damages = [damage_of(library) for library in libraries if library.exists()]
            return Kernels(level.name, "in the package", "; ".join(filter(None, damages)))
        if cache is not None and (cache / file).exists():
            return Kernels(level.name, "in the cache folder")
        with tempfile.TemporaryDirectory() as making:
            compile_library(OPENMP, level, Path(making, file))
        return Kernels(level.name, f"compiled at first use, by {compiler_command()[0]}")
    except UnavailableError as error:
        return Kernels(None, reason=str(error), output=error.output)
    except NanoConfigError:
        return None


def inspect_cache() -> CacheFolder:
    """Return the facts about the cache folder of this user."""
    folder = cache_path()
    if folder is None:
        return CacheFolder("", False, True)
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    is_writable = os.access(place, os.W_OK | os.X_OK)
    if is_writable and place == folder:
        try:
            with opened_folder(place):
                pass
        except (OSError, NanoError):  # others can write to it
            is_writable = False
    flag = getattr(os, "ST_NOEXEC", 0)  # exists only on Linux
    is_executable = not (flag and os.statvfs(place).f_flag & flag)
    return CacheFolder(str(folder), is_writable, is_executable, place in (folder, folder.parent))


def _read_memory(tree: Tree, is_live: bool) -> Memory:
    total, available = map(tree.sizes("/proc/meminfo").get, ("MemTotal", "MemAvailable"))
    limit = read_memory_limit(tree)
    shared = os.statvfs(SHARED_MEMORY) if is_live and os.path.exists(SHARED_MEMORY) else None
    return Memory(
        total=total,
        available=available,
        limit=limit if total is None or (limit is not None and limit < total) else None,
        left=memory_left(tree, is_live),
        shared=None if shared is None else shared.f_frsize * shared.f_blocks,
    )
