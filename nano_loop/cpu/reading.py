"""The reader of a `Machine`, from /proc and /sys or else from system calls."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from nano_loop.cpu.cgroup import read_cpuset, read_quota
from nano_loop.cpu.cpuinfo import architecture, cpu_name, cpuinfo_instruction_sets, read_cpuinfo
from nano_loop.cpu.host import Host, host_instruction_sets, host_logical_cpus, host_name, live_host
from nano_loop.cpu.machine import LogicalCpu, Machine
from nano_loop.cpu.topology import ONLINE, read_logical_cpus, read_online
from nano_loop.cpu.tree import Tree


def read_machine(root: Path | str = "/", affinity: Collection[int] | None = None, host: Host | None = None) -> Machine:
    """Return a description of the machine and of the part that this process may use.

    Never raises. If a source is missing, unreadable or damaged, the next best one is used, down to a single CPU.
    Nothing is changed.

    Parameters
    ----------
    root : str or pathlib.Path
        The folder that contains ``proc`` and ``sys``: ``/`` for the live machine, others for recorded ones.
    affinity : collection of int, optional
        The CPUs that this process may run on. By default, the mask of the calling thread on the live machine, and all
        CPUs of a recorded machine.
    host : Host, optional
        Properties that are not in files. By default, queried from the system for ``/``, and unknown for recorded
        machines.

    Returns
    -------
    Machine
        The current state. Affinity and quotas can change while a process runs.
    """
    tree, is_live = Tree(root), Path(root) == Path("/")
    if host is None:
        host = live_host() if is_live else Host()
    hardware = _live_hardware(host, tree.text(ONLINE)) if is_live else _read_hardware(tree, host)
    mask = host.affinity if affinity is None else affinity
    return Machine(
        name=hardware.name,
        architecture=hardware.architecture,
        logical_cpus=hardware.logical_cpus,
        allowed=_allowed([cpu.id for cpu in hardware.logical_cpus], mask, read_cpuset(tree)),
        quota=read_quota(tree),
        instruction_sets=hardware.instruction_sets,
    )


class _Hardware(NamedTuple):
    """What does not change while CPUs stay online."""

    name: str
    architecture: str
    logical_cpus: tuple[LogicalCpu, ...]
    instruction_sets: frozenset[str]


def _read_hardware(tree: Tree, host: Host) -> _Hardware:
    blocks = read_cpuinfo(tree)
    # CPUs in the live mask exist even if the files do not list them: in an LXC container, the files renumber from 0.
    online = sorted({*read_online(tree, blocks), *(host.affinity or ())})
    kind = host.architecture or tree.text("/proc/sys/kernel/arch").strip() or architecture(blocks) or "unknown"
    return _Hardware(
        name=cpu_name(blocks) or host_name(host) or kind,
        architecture=kind,
        logical_cpus=read_logical_cpus(tree, online, blocks) if online else host_logical_cpus(host),
        instruction_sets=cpuinfo_instruction_sets(blocks) or host_instruction_sets(host),
    )


_hardware: dict[Any, _Hardware] = {}  # of the live machine, by what could change it


def _live_hardware(host: Host, online: str) -> _Hardware:
    """Read the hardware of the live machine once for each set of CPUs, which takes hundreds of files."""
    key = online, host.affinity, host.logical_count
    if key not in _hardware:
        _hardware[key] = _read_hardware(Tree("/"), host)
    return _hardware[key]


def _allowed(online: Collection[int], affinity: Collection[int] | None, cpuset: Collection[int]) -> tuple[int, ...]:
    """Return the intersection of the three sets of CPUs.

    A running process has at least one CPU, so an empty intersection must be wrong. In that case, the cpuset is ignored
    first, then the affinity.
    """
    limits = [limit for limit in (affinity, cpuset) if limit]
    while limits and not set(online).intersection(*limits):
        limits.pop()
    return tuple(sorted(set(online).intersection(*limits)))
