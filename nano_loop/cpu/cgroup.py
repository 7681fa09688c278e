"""The limits of control groups on this process: a quota of CPU time, a set of CPUs, and memory.

The limits of all ancestors apply too, so limits are read from the process's own cgroup up to the root. Version 1,
version 2 and hybrid set-ups are read in the same way: ``/proc/self/cgroup`` names the cgroup of the process, and
``/proc/self/mountinfo`` the folder of its files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from nano_loop.cpu.tree import Tree, parse_number

UNIFIED = ""  # the hierarchy of version 2, for which /proc/self/cgroup lists no controllers
DEFAULT_PERIOD = 100_000  # the kernel's default, in microseconds


class Mount(NamedTuple):
    """One mounted cgroup hierarchy."""

    point: str
    root: str
    controllers: frozenset[str]


USUAL_MOUNTS = (
    Mount("/sys/fs/cgroup", "/", frozenset({UNIFIED})),
    Mount("/sys/fs/cgroup/unified", "/", frozenset({UNIFIED})),
    Mount("/sys/fs/cgroup/cpu", "/", frozenset({"cpu"})),
    Mount("/sys/fs/cgroup/cpu,cpuacct", "/", frozenset({"cpu"})),
    Mount("/sys/fs/cgroup/cpuset", "/", frozenset({"cpuset"})),
    Mount("/sys/fs/cgroup/memory", "/", frozenset({"memory"})),
)


def read_quota(tree: Tree) -> float | None:
    """Return the CPU time that this process may use, as a number of CPUs, or None if there is no limit."""
    quotas = [_folder_quota(tree, folder) for folder in _folders(tree, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def read_cpuset(tree: Tree) -> tuple[int, ...]:
    """Return the CPUs of the nearest cgroup that defines a cpuset, or an empty tuple."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    for folder in _folders(tree, "cpuset"):
        for name in names:
            if cpus := tree.cpu_list(f"{folder}/{name}"):
                return cpus
    return ()


def read_memory_limit(tree: Tree) -> int | None:
    """Return the memory limit of the process's cgroups in bytes, or None if there is no limit."""
    names = ("memory.max", "memory.limit_in_bytes")  # without a limit: "max", or a number with 19 digits
    limits = [tree.number(f"{folder}/{name}") for folder in _folders(tree, "memory") for name in names]
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def read_memory_left(tree: Tree) -> int | None:
    """Return the bytes that the cgroups may still allocate, with swap and page cache, or None if there is no limit."""
    left = [_folder_left(tree, folder) for folder in _folders(tree, "memory")]
    return min((count for count in left if count is not None), default=None)


def _folder_left(tree: Tree, folder: str) -> int | None:
    """Return the bytes that one cgroup's limit leaves; None if it has no limit."""
    version_1 = tree.number(f"{folder}/memory.limit_in_bytes")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version_1 else ("memory.max", "memory.current")
    limit, usage = (tree.number(f"{folder}/{name}") for name in names)
    if not limit or limit < 0 or usage is None:
        return None
    swap_left = tree.sizes("/proc/meminfo").get("SwapFree", 0)
    if version_1:  # the limits of memory and swap together
        both, used = (tree.number(f"{folder}/memory.memsw.{name}_in_bytes") for name in ("limit", "usage"))
        limits = None if both is None or used is None else (both - limit) - (used - usage)
    else:
        both, used = (tree.number(f"{folder}/memory.swap.{name}") for name in ("max", "current"))
        limits = None if both is None or used is None else both - used
    swap_left = swap_left if limits is None else max(min(swap_left, limits), 0)
    stat = tree.text(f"{folder}/memory.stat")
    numbers: dict[str, str] = dict(re.findall(r"^(?:total_)?(cache|file|shmem) (\d{1,18})$", stat, re.MULTILINE))
    files = int(numbers.get("file", numbers.get("cache", 0))) - int(numbers.get("shmem", 0))
    return max(limit - usage + max(files, 0) + swap_left, 0)


def _folder_quota(tree: Tree, folder: str) -> float | None:
    """Return one cgroup's own limit in CPUs; ``max`` and -1 mean none."""
    fields = tree.text(f"{folder}/cpu.max").split()
    if not fields:
        fields = [tree.text(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period")]
    quota = parse_number(fields[0])
    period = (parse_number(fields[1]) if len(fields) > 1 else None) or DEFAULT_PERIOD
    return quota / period if quota is not None and quota > 0 and period > 0 else None


def _folders(tree: Tree, controller: str) -> Iterator[str]:
    """Yield the folders of the process's cgroup and its ancestors, nearest first."""
    memberships = _read_memberships(tree)
    for mount in _read_mounts(tree):
        for name in (controller, UNIFIED):
            if name in mount.controllers:
                yield from _folders_upwards(mount, memberships.get(name, "/"))


def _folders_upwards(mount: Mount, cgroup: str) -> list[str]:
    try:
        below = PurePosixPath(cgroup).relative_to(mount.root).parts
    except ValueError:
        # In a container, the mount starts at the container's own cgroup, while the path may be the host's.
        below = ()
    return ["/".join([mount.point, *below[:depth]]) for depth in range(len(below), -1, -1)]


def _read_memberships(tree: Tree) -> dict[str, str]:
    """Return the process's cgroup for each controller, from lines such as ``4:cpu,cpuacct:/docker/ab12``."""
    lines = [line.split(":", 2) for line in tree.text("/proc/self/cgroup").splitlines()]
    fields = [line for line in lines if len(line) == 3]
    return {controller: path for _, controllers, path in fields for controller in controllers.split(",")}


def _read_mounts(tree: Tree) -> tuple[Mount, ...]:
    lines = tree.text("/proc/self/mountinfo").splitlines()
    mounts = tuple(mount for line in lines if (mount := _parse_mount(line)) is not None)
    return mounts or USUAL_MOUNTS


def _parse_mount(line: str) -> Mount | None:
    """Read a line ``id parent device root point options ... - type source superoptions``."""
    left, _, right = line.partition(" - ")
    place, kind = left.split(), right.split()
    if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
        return None
    controllers = {UNIFIED} if kind[0] == "cgroup2" else set(kind[2].split(","))
    return Mount(place[4], place[3], frozenset(controllers))
