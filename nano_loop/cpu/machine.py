"""The description of a machine, and of the part that this process may use."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

CoreKind = Literal["performance", "efficiency"]


@dataclass(frozen=True)
class LogicalCpu:
    """A logical CPU, and its place in the topology."""

    id: int  # the id in affinity masks
    physical_core: int  # the physical core, identified by its smallest CPU id
    package: int = 0  # the socket
    numa_node: int = 0  # the NUMA node
    last_level_cache: int = 0  # the last-level cache, identified by the smallest CPU id that shares it
    core_kind: CoreKind | None = None  # the kind of core on a hybrid machine; None if all cores are equal


@dataclass(frozen=True)
class Machine:
    """A machine, and the part of it that this process may use."""

    name: str  # the processor's model, such as ``AMD EPYC 9354``
    architecture: str  # ``x86_64``, ``aarch64`` or, on macOS, ``arm64``
    logical_cpus: tuple[LogicalCpu, ...]  # every CPU that is online, sorted by id
    #: The ids of the CPUs that this process may run on: those in the affinity mask, in the cpuset and online.
    allowed: tuple[int, ...]
    quota: float | None = None  # the CPU quota of the process's cgroups, as a number of CPUs; None if there is no limit
    #: The names of the instruction sets in Linux's /proc/cpuinfo, such as ``avx512_bf16`` or, on ARM, ``bf16``.
    instruction_sets: frozenset[str] = frozenset()

    @property
    def has_fast_bf16(self) -> bool:
        """Whether the CPU has bf16 instructions, which make bf16 products faster than fp32 ones."""
        sets = self.instruction_sets
        return "avx512_bf16" in sets or {"amx_bf16", "amx_tile"} <= sets or "bf16" in sets

    @property
    def physical_cores(self) -> tuple[tuple[int, ...], ...]:
        """The allowed CPU ids, grouped by physical core: one for computation, then its SMT siblings.

        Cores are sorted by NUMA node, performance, last-level cache and id, so that neighbours share memory and caches.
        """
        allowed = set(self.allowed)
        cores: defaultdict[int, list[LogicalCpu]] = defaultdict(list)
        for cpu in self.logical_cpus:
            if cpu.id in allowed:
                cores[cpu.physical_core].append(cpu)
        return tuple(tuple(cpu.id for cpu in core) for core in sorted(cores.values(), key=_place))

    @property
    def num_threads(self) -> int:
        """The best number of compute threads: one per physical core, within the quota, and at least one."""
        cores = len(self.physical_cores)
        return max(1, cores if self.quota is None else min(cores, math.floor(self.quota)))

    def as_dict(self) -> dict[str, Any]:
        """Return the description as plain lists, dicts, strings and numbers, for JSON."""
        return {
            "name": self.name,
            "architecture": self.architecture,
            "logical_cpus": [vars(cpu).copy() for cpu in self.logical_cpus],
            "allowed": list(self.allowed),
            "quota": self.quota,
            "instruction_sets": sorted(self.instruction_sets),
            "has_fast_bf16": self.has_fast_bf16,
            "physical_cores": [list(core) for core in self.physical_cores],
            "num_threads": self.num_threads,
        }


def _place(core: list[LogicalCpu]) -> tuple[int, bool, int, int]:
    first = core[0]
    return first.numa_node, first.core_kind == "efficiency", first.last_level_cache, first.id
