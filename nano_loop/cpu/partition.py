"""The partition of a host's cores among its processes.

All shares have the same size, since synchronized ranks wait for the slowest one. Remaining cores stay idle. For the
same reason, a single share that crosses a boundary slows down all ranks. So the cores are split within each last-level
cache if that yields enough shares of this size, otherwise within each NUMA node, otherwise across the whole machine. If
there are more shares than processes, shares on the fewest nodes are used, to keep communication local, and about
equally many from each of these nodes and caches, to use their full memory bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from nano_loop.cpu.machine import Machine
from nano_loop.cpu.tree import format_cpu_list
from nano_loop.errors import NanoConfigError, NanoWarning, error_message

#: Variables that make libgomp or libiomp bind the thread that loads it.
BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
Core = tuple[int, ...]  # the allowed CPU ids of one physical core; the first one is used for computation
Piece = list[Core]  # the cores of one share


@dataclass(frozen=True)
class Share:
    """The CPUs of one process of this host."""

    #: The ids of the logical CPUs for computation, one per physical core, in the machine's order of cores.
    cpus: tuple[int, ...]
    #: The CPUs for `DataLoader` workers: SMT siblings of `cpus`, or `cpus` if there are none.
    loader_cpus: tuple[int, ...]


def partition(machine: Machine, num_processes: int, cores_each: int | None = None) -> tuple[Share, ...]:
    """Return equal, disjoint shares, by default with as many cores as the affinity, the cpuset and the quota allow.

    Efficiency cores of a hybrid machine are used only if there are fewer performance cores than processes. Raises a
    `NanoConfigError` if the shares need more physical cores than there are within the quota.
    """
    num_cores = num_processes * (cores_each or 1)
    if num_cores > machine.num_threads:
        raise NanoConfigError(_too_many(machine, num_processes, cores_each))
    cores = _cores_to_use(machine, num_cores)
    size = cores_each or min(len(cores), machine.num_threads) // num_processes
    return tuple(_share(piece) for piece in _pieces(machine, cores, size, num_processes))


def process_counts(machine: Machine) -> tuple[int, ...]:
    """Return the numbers of processes that are worth measuring on a host, starting with one.

    Equal shares fill the cores of each NUMA node. Each number is at least twice the previous one: others differ little.
    """
    cores = _cores_to_use(machine, 1)
    node_of = {cpu.id: cpu.numa_node for cpu in machine.logical_cpus}
    nodes = [len(node) for node in _grouped(cores, lambda core: node_of[core[0]])]
    if machine.num_threads < len(cores):  # limited by a quota, which is not divided among nodes
        nodes = [machine.num_threads]
    counts, total, most = [1], sum(nodes), math.gcd(*nodes)
    for size in range(most, 0, -1):
        if most % size == 0 and total // size >= 2 * counts[-1]:
            counts.append(total // size)
    return tuple(counts)


def given_shares(machine: Machine, cpu_for_each_process: Sequence[Sequence[int]]) -> tuple[Share, ...]:
    """Return the shares for the user's lists of CPU ids, in the same order.

    If a list has several siblings of a core, the first computes and the others are for `DataLoader` workers. Otherwise
    these use the allowed siblings that are in no list. Raises a `NanoConfigError` that lists all problems, and warns
    about CPUs that are omitted because they do not exist or this process may not use them.
    """
    allowed = set(machine.allowed)
    lists = [[cpu for cpu in dict.fromkeys(cpus) if cpu in allowed] for cpus in cpu_for_each_process]
    claimed = Counter(cpu for cpus in lists for cpu in cpus)
    unusable = [(index, cpus) for index, cpus in enumerate(cpu_for_each_process) if not lists[index]]
    if problems := [*_without_cpus(machine, unusable), *_in_several_lists(claimed)]:
        raise NanoConfigError("\n".join(problems))
    if left_out := {cpu for cpus in cpu_for_each_process for cpu in cpus} - allowed:
        text = error_message(
            "cpu_for_each_process", f"omitted {_why_not(machine, left_out)}", "Remove them from the lists"
        )
        warnings.warn(text, NanoWarning, stacklevel=2)
    return tuple(_given_share(machine, cpus, claimed) for cpus in lists)


def restricted(machine: Machine, share: Share, num_processes: int) -> Machine:
    """Return the machine limited to a share's CPUs, and to one of `num_processes` equal parts of the quota."""
    quota = None if machine.quota is None else machine.quota / num_processes
    return dataclasses.replace(machine, allowed=share.cpus, quota=quota)


def _cores_to_use(machine: Machine, num_cores: int) -> Piece:
    """Return the performance cores if there are enough, otherwise all cores."""
    slow = {cpu.id for cpu in machine.logical_cpus if cpu.core_kind == "efficiency"}
    fast = [core for core in machine.physical_cores if core[0] not in slow]
    return fast if len(fast) >= num_cores else [*machine.physical_cores]


def _pieces(machine: Machine, cores: Piece, size: int, count: int) -> list[Piece]:
    """Return `count` pieces of `size` cores, split by the rule in the module's docstring."""
    cpus = {cpu.id: cpu for cpu in machine.logical_cpus}
    places: tuple[Callable[[Core], int], ...] = (
        lambda core: cpus[core[0]].last_level_cache,
        lambda core: cpus[core[0]].numa_node,
    )
    for place in places:
        cuts: list[list[Piece]] = []
        for node in _grouped(cores, places[-1]):
            cuts += [_cut(group, size) for group in _grouped(node, place)]
            if sum(map(len, cuts)) >= count:
                return _about_as_many_from_each(cuts, count)
    return _cut(cores, size)[:count]


def _grouped(cores: Piece, place: Callable[[Core], int]) -> Collection[Piece]:
    groups: defaultdict[int, Piece] = defaultdict(list)
    for core in cores:
        groups[place(core)].append(core)
    return groups.values()


def _cut(cores: Piece, size: int) -> list[Piece]:
    """Return as many pieces of `size` neighbouring cores as possible."""
    return [cores[start : start + size] for start in range(0, len(cores) - size + 1, size)]


def _about_as_many_from_each(groups: list[list[Piece]], count: int) -> list[Piece]:
    group_of = [index for index, pieces in enumerate(groups) for _ in pieces]
    # Evenly spaced picks over all pieces use about equally many from each cache, and so from each node.
    taken = Counter(group_of[step * len(group_of) // count] for step in range(count))
    return [piece for index, pieces in enumerate(groups) for piece in pieces[: taken[index]]]


def _share(cores: Iterable[Core], spare: Iterable[int] = ()) -> Share:
    """Return a share that computes on the first CPU of each core. Loaders use the others, or `spare` without any."""
    cpus = tuple(core[0] for core in cores)
    siblings = tuple(cpu for core in cores for cpu in core[1:])
    return Share(cpus, siblings or tuple(spare) or cpus)


def _given_share(machine: Machine, cpus: Sequence[int], claimed: Collection[int]) -> Share:
    touched = [core for core in machine.physical_cores if set(core) & set(cpus)]
    in_given_order = [tuple(cpu for cpu in cpus if cpu in core) for core in touched]
    return _share(in_given_order, spare=[cpu for core in touched for cpu in core if cpu not in claimed])


def _why_not(machine: Machine, cpus: Collection[int]) -> str:
    """Return a text with the CPUs that cannot be used, the reasons, and the CPUs that can be used."""
    online = {cpu.id for cpu in machine.logical_cpus}
    reasons = {"no such CPU": set(cpus) - online, "not in this process's affinity mask": set(cpus) & online}
    named = [f"{format_cpu_list(ids)} ({reason})" for reason, ids in reasons.items() if ids]
    return f"{', '.join(named) or 'nothing'}; this process may use {_extent(machine)}"


def _without_cpus(machine: Machine, lists: Iterable[tuple[int, Sequence[int]]]) -> Iterator[str]:
    for index, cpus in lists:
        why = f"no CPU is left without {_why_not(machine, cpus)}"
        yield error_message(f"cpu_for_each_process[{index}]={[*cpus]}", why, "Use some of these")


def _in_several_lists(claimed: Counter[int]) -> Iterator[str]:
    if shared := [cpu for cpu, lists in claimed.items() if lists > 1]:
        got = f"cpu_for_each_process has CPU {format_cpu_list(shared)} in more than one list"
        yield error_message(got, "a CPU computes for one process", "Remove it from the others")


def _too_many(machine: Machine, num_processes: int, cores_each: int | None) -> str:
    quota = "" if machine.quota is None else f", quota {machine.quota:g}"
    limit = f"this process may use {machine.num_threads} ({_extent(machine)}{quota})"
    binding = [f"{name}={os.environ[name]}" for name in BINDING_VARIABLES if os.environ.get(name)]
    if binding and len(machine.allowed) < len(machine.logical_cpus):
        hint = f"Unset {' and '.join(binding)}, which makes OpenMP bind this process when it is loaded"
    else:
        hint = "Lower num_processes, or widen the CPU affinity" + (" or the quota" if quota else "")
    num_cores = num_processes * (cores_each or 1)
    got = f"num_processes={num_processes}"
    if cores_each:
        got += f" with cpu_for_each_process={cores_each}"
        hint = f"Lower cpu_for_each_process, or {hint[0].lower()}{hint[1:]}"
    return error_message(got, f"it needs {num_cores} physical cores, and {limit}", hint)


def _extent(machine: Machine) -> str:
    return f"CPUs {format_cpu_list(machine.allowed)} of {len(machine.logical_cpus)}"
