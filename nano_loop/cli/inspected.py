"""The facts of `doctor`: the machine, the limits of this process, its libraries, its packages and its environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_loop.cli.cache_inspected import CacheFolder, inspect_cache
from nano_loop.cli.kernels_inspected import Kernels, inspect_kernels
from nano_loop.cpu import Host, Machine, read_machine
from nano_loop.cpu.cgroup import read_cpuset, read_memory_limit
from nano_loop.cpu.glibc import libraries_in
from nano_loop.cpu.host import live_host
from nano_loop.cpu.tree import Tree, parse_number

#: The packages whose versions matter together, by the names under which they are installed.
PACKAGES = (
    *("nano-loop", "torch", "intel-extension-for-pytorch", "lightning", "pytorch-lightning", "lightning-fabric"),
    "ray",
)
SHARED_MEMORY = "/dev/shm"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
#: There where a GPU is that torch's builds for CUDA compute on.
_OF_GPUS = ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")


@dataclass(frozen=True)
class Memory:
    """The memory, in bytes; None where it is not known."""

    #: What the machine has, and what programs can still get.
    total: int | None = None
    available: int | None = None
    limit: int | None = None  # what the process's cgroups may use; None if there is no limit
    shared: int | None = None  # the size of the file system for shared memory
    #: The kernel's mode of transparent huge pages: ``always``, ``madvise`` or ``never``; empty if it is not known.
    huge_pages: str = ""


@dataclass(frozen=True)
class Inspected:
    """All that findings are made from."""

    machine: Machine  # the machine, and the part of it that this process may use
    affinity: frozenset[int] | None = None  # the CPUs of the affinity mask; None if there are no masks
    cpuset: tuple[int, ...] = ()  # the CPUs of the cgroup; empty if there is no cpuset
    memory: Memory = field(default_factory=Memory)
    environ: Mapping[str, str] = field(default_factory=dict)
    #: The paths of the shared libraries in this process; of a process with torch if `torch` is there.
    libraries: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)  # the versions of the installed packages in `PACKAGES`
    #: What each of these packages requires, as in its metadata.
    requirements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    torch: Mapping[str, Any] = field(default_factory=dict)  # what torch says of itself, if it was asked; else empty
    #: The kernels in C; None if they are not known, as on a recorded machine.
    kernels: Kernels | None = None
    cache: CacheFolder | None = None  # None as on a recorded machine
    #: The version of CUDA that torch was built for, on a machine without a GPU; empty for another build.
    unused_cuda: str = ""

    def has_any(self, *instruction_sets: str) -> bool:
        """Whether the CPU has one of these instruction sets."""
        return bool(self.machine.instruction_sets & {*instruction_sets})


def inspect_system(
    root: Path | str = "/",
    environ: Mapping[str, str] = os.environ,
    host: Host | None = None,
    torch: Mapping[str, Any] | None = None,
) -> Inspected:
    """Return what there is to know of a machine and of this process, without an import of torch.

    Parameters
    ----------
    root : str or pathlib.Path
        The folder that contains ``proc`` and ``sys``: ``/`` for the live machine, others for recorded ones.
    environ : mapping
        The environment.
    host : Host, optional
        What is not in files. By default, queried from the system for ``/``.
    torch : mapping, optional
        What a process that has imported torch has said, from `nano_loop.cli.torch_inspected`.
    """
    tree = Tree(root)
    is_live = Path(root) == Path("/")
    if host is None:
        host = live_host() if is_live else Host()
    versions, machine = installed(), read_machine(root, host=host)
    return Inspected(
        machine=machine,
        affinity=host.affinity,
        cpuset=read_cpuset(tree),
        memory=_read_memory(tree),
        environ=environ,
        libraries=libraries_in((torch or {}).get("maps", "") or tree.text("/proc/self/maps")),
        packages=versions,
        requirements={name: tuple(importlib.metadata.requires(name) or ()) for name in versions},
        torch={name: value for name, value in (torch or {}).items() if name != "maps"},
        kernels=inspect_kernels(environ, machine.instruction_sets) if is_live else None,
        cache=inspect_cache() if is_live else None,
        unused_cuda=_cuda_of_torch() if is_live and not any(map(os.path.exists, _OF_GPUS)) else "",
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


def _cuda_of_torch() -> str:
    """Return the version of CUDA that the installed torch was built for, which its import would take seconds to say."""
    try:
        file = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(file)).read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""
    version = re.search(r"^cuda.*= '([\d.]+)'", text, re.MULTILINE)
    return version[1] if version else ""


def python_version() -> str:
    """Return the version of this Python."""
    return platform.python_version()


def _read_memory(tree: Tree) -> Memory:
    fields = dict(re.findall(r"^(\w+):\s+(\d{1,15}) kB$", tree.text("/proc/meminfo"), re.MULTILINE))
    total, available = (int(fields[name]) << 10 if name in fields else None for name in ("MemTotal", "MemAvailable"))
    limit = read_memory_limit(tree)
    modes = re.search(r"\[(\w+)\]", tree.text("/sys/kernel/mm/transparent_hugepage/enabled"))
    return Memory(
        total=total,
        available=available,
        limit=limit if total is None or (limit is not None and limit < total) else None,
        shared=_shared_memory(tree, total),
        huge_pages=modes[1] if modes else "",
    )


def _shared_memory(tree: Tree, total: int | None) -> int | None:
    """Return the size of the file system for shared memory: the mount option, or else half of the memory."""
    for line in reversed(tree.text("/proc/self/mountinfo").splitlines()):
        left, _, right = line.partition(" - ")
        place, kind = left.split(), right.split()
        if len(place) > 4 and len(kind) > 2 and place[4] == SHARED_MEMORY and kind[0] == "tmpfs":
            size = re.search(r"(?:^|,)size=(\d{1,18})([kmg]?)(?:,|$)", kind[2])
            if size:
                return (parse_number(size[1]) or 0) * _UNITS[size[2]]
            return None if total is None else total // 2
    return None
