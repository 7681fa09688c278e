"""Reads a `Machine` from /proc and /sys, or from what the system counts where there are none."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from nano_loop.cpu.cgroup import read_cpuset, read_quota
from nano_loop.cpu.cpuinfo import architecture, cpu_name, cpuinfo_instruction_sets, read_cpuinfo
from nano_loop.cpu.host import Host, host_instruction_sets, host_logical_cpus, host_name, live_host
from nano_loop.cpu.machine import Machine
from nano_loop.cpu.topology import read_logical_cpus, read_online
from nano_loop.cpu.tree import Tree


def read_machine(root: Path | str = "/", affinity: Collection[int] | None = None, host: Host | None = None) -> Machine:
    """Find out what the machine is and what of it this process may use.

    Never raises: what is missing, unreadable or garbled is replaced by the next best source, and in the end
    by one CPU. Nothing is changed.

    Parameters
    ----------
    root : str or pathlib.Path
        The folder that holds ``proc`` and ``sys``: ``/`` is the live machine, others are recorded ones.
    affinity : collection of int, optional
        The CPUs that this process may run on. By default the live mask of the calling thread, and every CPU
        of a recorded machine.
    host : Host, optional
        What no file says. By default the live system is asked for ``/``, and nothing is known of others.

    Returns
    -------
    Machine
        The machine, as of now: affinity and quotas can change while a process runs.
    """
    tree = Tree(root)
    if host is None:
        host = live_host() if Path(root) == Path("/") else Host()
    blocks = read_cpuinfo(tree)
    # A CPU of the live mask exists, whatever the files say: in an LXC container they count from 0 anew.
    online = sorted({*read_online(tree, blocks), *(host.affinity or ())})
    cpus = read_logical_cpus(tree, online, blocks) if online else host_logical_cpus(host)
    kind = _architecture(host.architecture or tree.text("/proc/sys/kernel/arch").strip() or architecture(blocks))
    mask = host.affinity if affinity is None else affinity
    return Machine(
        name=cpu_name(blocks) or host_name(host) or kind,
        architecture=kind,
        logical_cpus=cpus,
        allowed=_allowed([cpu.id for cpu in cpus], mask, read_cpuset(tree)),
        quota=read_quota(tree),
        instruction_sets=cpuinfo_instruction_sets(blocks) or host_instruction_sets(host),
    )


def _allowed(online: Collection[int], affinity: Collection[int] | None, cpuset: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs that all three name.

    A process that runs at all runs on some CPU, so masks that leave none are not believed: the cpuset is
    dropped first, then the affinity.
    """
    limits = [limit for limit in (affinity, cpuset) if limit]
    while limits and not set(online).intersection(*limits):
        limits.pop()
    return tuple(sorted(set(online).intersection(*limits)))


def _architecture(name: str) -> str:
    # Windows has another name for the same thing, in capitals.
    return {"amd64": "x86_64"}.get(name.lower(), name) or "unknown"
