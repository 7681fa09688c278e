"""The reader of a `Machine`, from /proc and /sys or from system calls."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from nano_loop.cpu.cgroup import read_cpuset, read_quota
from nano_loop.cpu.cpuinfo import cpu_name, cpuinfo_instruction_sets, read_cpuinfo
from nano_loop.cpu.machine import Machine
from nano_loop.cpu.topology import ONLINE, read_logical_cpus, read_online
from nano_loop.cpu.tree import Tree


@dataclass(frozen=True)
class Host:
    """Properties of the system that are not in files. Tests pass their own."""

    architecture: str = ""  # the result of `platform.machine`; empty if unknown
    #: The number of cores, as counted by psutil; None if unknown, or if `affinity` is known.
    cores: int | None = None
    #: The CPUs that this process may run on; None if the system has no affinity masks, like macOS.
    affinity: frozenset[int] | None = None


def live_host() -> Host:
    """Query the running system."""
    try:
        return Host(platform.machine(), affinity=frozenset(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        import psutil  # type: ignore[import-untyped,unused-ignore]  # reads all of sysfs on Linux

        return Host(platform.machine(), psutil.cpu_count(logical=False) or psutil.cpu_count())


def read_machine(root: Path | str = "/", host: Host | None = None) -> Machine:
    """Return a description of the machine and of the part that this process may use.

    Never raises: if a source is missing or damaged, the next best one is used, down to a single CPU. `root` is ``/``
    for the live machine, or the folder of a recorded one, whose `host`, properties that are not in files, is unknown by
    default.
    """
    tree, is_live = Tree(root), Path(root) == Path("/")
    if host is None:
        host = live_host() if is_live else Host()
    machine = _live_hardware(host, tree.text(ONLINE)) if is_live else _read_hardware(tree, host)
    usable = set(host.affinity or (cpu.id for cpu in machine.logical_cpus))
    # A process runs on at least one CPU, so a cpuset without any of its CPUs must be wrong.
    allowed = usable.intersection(read_cpuset(tree)) or usable
    return replace(machine, allowed=tuple(sorted(allowed)), quota=read_quota(tree))


def _read_hardware(tree: Tree, host: Host) -> Machine:
    """Return the facts that do not change while CPUs stay online."""
    blocks = read_cpuinfo(tree)
    # CPUs in the live mask exist even if the files do not list them: in an LXC container, the files renumber from 0.
    online = sorted({*read_online(tree, blocks), *(host.affinity or ())})
    kind = host.architecture or tree.text("/proc/sys/kernel/arch").strip() or "unknown"
    return Machine(
        name=cpu_name(blocks) or kind,
        architecture=kind,
        # A system without files has no masks either, so these numbers are only names.
        logical_cpus=read_logical_cpus(tree, online or range(host.cores or 1), blocks),
        allowed=(),
        instruction_sets=cpuinfo_instruction_sets(blocks),
    )


@cache  # it reads hundreds of files
def _live_hardware(host: Host, online: str) -> Machine:
    """Read the hardware of the live machine once for each set of CPUs."""
    return _read_hardware(Tree("/"), host)
