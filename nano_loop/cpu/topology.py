"""The topology in sysfs: core, package, NUMA node, last-level cache and kind of core of each CPU.

Without information in sysfs, /proc/cpuinfo is used. Without that, each CPU counts as a separate core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from nano_loop.cpu.cpuinfo import Block, field_by_cpu
from nano_loop.cpu.machine import CoreKind, LogicalCpu
from nano_loop.cpu.tree import Tree

CPUS = "/sys/devices/system/cpu"
ONLINE = f"{CPUS}/online"
NODES = "/sys/devices/system/node"

# IBM POWER has eight. Higher numbers are errors of virtual machines; with a wrong 16, 15 CPUs would stay idle.
MOST_THREADS_PER_CORE = 8

# A core with less than this fraction of the largest capacity counts as an efficiency core. On ARM's three-tier chips,
# the middle cores have 0.75 or more, and the small ones less than 0.55.
EFFICIENCY_CAPACITY = 0.65


def read_online(tree: Tree, blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return the ids of the CPUs that are online, or an empty tuple if no file lists them."""
    return tree.cpu_list(ONLINE) or tuple(sorted(field_by_cpu(blocks, "processor")))


def read_logical_cpus(tree: Tree, online: Sequence[int], blocks: Sequence[Block]) -> tuple[LogicalCpu, ...]:
    """Return the CPUs `online`, in this order, with their topology; `blocks` are those of /proc/cpuinfo."""
    packages = _read_packages(tree, online, blocks)
    nodes = _read_nodes(tree)
    cores = _read_cores(tree, online, packages, blocks)
    caches = _read_caches(tree, online, packages, nodes)
    kinds = _read_kinds(tree, online)
    return tuple(
        LogicalCpu(cpu, cores[cpu], packages[cpu], nodes.get(cpu, 0), caches[cpu], kinds.get(cpu)) for cpu in online
    )


def _read_packages(tree: Tree, online: Sequence[int], blocks: Sequence[Block]) -> dict[int, int]:
    fallback = field_by_cpu(blocks, "physical id")
    numbers = {cpu: tree.number(f"{CPUS}/cpu{cpu}/topology/physical_package_id") for cpu in online}
    # Some ARM firmware reports -1 for "unknown".
    return {
        cpu: number if number is not None and number >= 0 else fallback.get(cpu, 0) for cpu, number in numbers.items()
    }


def _read_nodes(tree: Tree) -> dict[int, int]:
    nodes = tree.numbered_folders(NODES, "node")
    return {cpu: node for node in nodes for cpu in tree.cpu_list(f"{NODES}/node{node}/cpulist")}


def _read_cores(
    tree: Tree, online: Sequence[int], packages: Mapping[int, int], blocks: Sequence[Block]
) -> dict[int, int]:
    core_ids = field_by_cpu(blocks, "core id")
    keys = {cpu: _core_key(tree, cpu, packages[cpu], core_ids.get(cpu)) for cpu in online}
    sizes = Counter(keys.values())
    return _name_groups({cpu: key if sizes[key] <= MOST_THREADS_PER_CORE else cpu for cpu, key in keys.items()})


def _core_key(tree: Tree, cpu: int, package: int, cpuinfo_core_id: int | None) -> Hashable:
    """Return a key that is shared only by the CPUs of one physical core."""
    topology = f"{CPUS}/cpu{cpu}/topology"
    # The list takes precedence, since a core_id is unique only per package, and on some ARM boards only per cluster.
    siblings = tree.cpu_list(f"{topology}/thread_siblings_list") or tree.cpu_list(f"{topology}/core_cpus_list")
    if cpu in siblings:
        return siblings
    core_id = tree.number(f"{topology}/core_id")
    if core_id is None or core_id < 0:
        core_id = cpuinfo_core_id
    return cpu if core_id is None else ("core_id", package, tree.number(f"{topology}/die_id"), core_id)


def _read_caches(
    tree: Tree, online: Sequence[int], packages: Mapping[int, int], nodes: Mapping[int, int]
) -> dict[int, int]:
    keys: dict[int, Hashable] = {}
    for cpu in online:
        if cpu not in keys:
            shared = _last_level_cache(tree, cpu)
            # Without information on caches, CPUs of the same package and node are assumed to share one.
            keys[cpu] = shared or ("node", packages[cpu], nodes.get(cpu, 0))
            # CPUs that share the cache are not read again, which saves about 3,000 files on 256 CPUs.
            keys.update((other, shared) for other in shared if other not in keys)
    return _name_groups({cpu: keys[cpu] for cpu in online})


def _last_level_cache(tree: Tree, cpu: int) -> tuple[int, ...]:
    """Return the CPUs that share the last-level cache of `cpu`, or an empty tuple if sysfs does not list them."""
    folder = f"{CPUS}/cpu{cpu}/cache"
    levels: dict[int, tuple[int, ...]] = {}
    for index in tree.numbered_folders(folder, "index"):
        level = tree.number(f"{folder}/index{index}/level")
        shared = tree.cpu_list(f"{folder}/index{index}/shared_cpu_list")
        if level is not None and cpu in shared:
            levels[level] = shared
    return levels[max(levels)] if levels else ()


def _name_groups(keys: Mapping[int, Hashable]) -> dict[int, int]:
    """Map each CPU to the smallest CPU id with the same key, which identifies the group on the machine."""
    names: dict[Hashable, int] = {}
    for cpu in sorted(keys):
        names.setdefault(keys[cpu], cpu)
    return {cpu: names[key] for cpu, key in keys.items()}


def _read_kinds(tree: Tree, online: Sequence[int]) -> dict[int, CoreKind]:
    """Return the kind of each core on a hybrid machine, or an empty dict if all cores are equal."""
    big = tree.cpu_list("/sys/devices/cpu_core/cpus")
    small = tree.cpu_list("/sys/devices/cpu_atom/cpus")
    if big and small:  # Intel
        return {cpu: "performance" if cpu in big else "efficiency" for cpu in online}
    return _kinds_by_capacity({cpu: tree.number(f"{CPUS}/cpu{cpu}/cpu_capacity") for cpu in online})


def _kinds_by_capacity(capacities: Mapping[int, int | None]) -> dict[int, CoreKind]:
    """Distinguish ARM's big and LITTLE cores by the capacity that the kernel reports."""
    known = {cpu: capacity for cpu, capacity in capacities.items() if capacity is not None}
    limit = EFFICIENCY_CAPACITY * max(known.values(), default=0)
    if all(capacity >= limit for capacity in known.values()):
        return {}
    return {cpu: "performance" if capacity >= limit else "efficiency" for cpu, capacity in known.items()}
