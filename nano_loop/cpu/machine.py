"""What the machine is, and what of it this process may use."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal

CoreKind = Literal["performance", "efficiency"]


@dataclass(frozen=True)
class LogicalCpu:
    """One CPU as the scheduler counts them, and where it sits.

    Attributes
    ----------
    id : int
        The number that affinity masks use.
    physical_core : int
        Its core, named after that core's smallest CPU id: unique over the machine.
    package : int
        Its socket.
    numa_node : int
        The node whose memory is nearest.
    last_level_cache : int
        The biggest cache it can reach, named after the smallest CPU id that shares it: unique over the
        machine.
    core_kind : {"performance", "efficiency"} or None
        Which kind of core it is on a hybrid machine; None where all cores are alike.
    """

    id: int
    physical_core: int
    package: int = 0
    numa_node: int = 0
    last_level_cache: int = 0
    core_kind: CoreKind | None = None


@dataclass(frozen=True)
class Machine:
    """A machine, and the share of it that this process was given.

    Attributes
    ----------
    name : str
        The processor's model, such as ``AMD EPYC 9354``.
    architecture : str
        ``x86_64``, ``aarch64`` or, on macOS, ``arm64``.
    logical_cpus : tuple of LogicalCpu
        Every CPU that is online, sorted by id.
    allowed : tuple of int
        The ids that this process may run on: affinity, cpuset and online CPUs at once.
    quota : float or None
        The CPU time that the process's cgroups grant, in CPUs; None without a limit.
    instruction_sets : frozenset of str
        By their names in Linux's /proc/cpuinfo, such as ``avx512_bf16`` or, on ARM, ``bf16``.
    """

    name: str
    architecture: str
    logical_cpus: tuple[LogicalCpu, ...]
    allowed: tuple[int, ...]
    quota: float | None = None
    instruction_sets: frozenset[str] = frozenset()

    @property
    def has_fast_bf16(self) -> bool:
        """Whether the CPU has bf16 instructions, with which bf16 products are faster than fp32."""
        sets = self.instruction_sets
        return "avx512_bf16" in sets or {"amx_bf16", "amx_tile"} <= sets or "bf16" in sets

    @property
    def physical_cores(self) -> tuple[tuple[int, ...], ...]:
        """The allowed CPU ids by physical core.

        In each core the first id is the one to compute on, the others are its SMT siblings. Cores that share
        memory and cache stand side by side, so that contiguous shares are good ones: they are sorted by NUMA
        node, then on hybrid machines performance cores first, then by last-level cache, then by id.
        """
        allowed = set(self.allowed)
        cores: defaultdict[int, list[LogicalCpu]] = defaultdict(list)
        for cpu in self.logical_cpus:
            if cpu.id in allowed:
                cores[cpu.physical_core].append(cpu)
        return tuple(tuple(cpu.id for cpu in core) for core in sorted(cores.values(), key=_place))

    @property
    def num_threads(self) -> int:
        """How many compute threads pay: one a physical core, within the quota, and at least one."""
        cores = len(self.physical_cores)
        return max(1, cores if self.quota is None else min(cores, math.floor(self.quota)))

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain lists, dicts, strings and numbers, for JSON."""
        return {
            "name": self.name,
            "architecture": self.architecture,
            "logical_cpus": [asdict(cpu) for cpu in self.logical_cpus],
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
