"""The host's properties that /proc and /sys do not provide, such as everything on macOS."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from nano_loop.cpu.cpu_list import HIGHEST_CPU_ID
from nano_loop.cpu.cpuinfo import tidy_name
from nano_loop.cpu.machine import CoreKind, LogicalCpu
from nano_loop.cpu.tree import parse_number

# Apple's names of features that differ from those of Linux on the same chip.
APPLE_FEATURES = {
    "DotProd": "asimddp",
    "FHM": "asimdfhm",
    "FP16": "asimdhp",
    "LSE": "atomics",
    "RDM": "asimdrdm",
    "SHA256": "sha2",
}


@dataclass(frozen=True)
class Host:
    """Properties of the system that `read_machine` cannot read from files. Tests pass their own."""

    architecture: str = ""  # the result of `platform.machine`; empty if unknown
    #: The numbers of CPUs and cores, as counted by psutil; None if unknown, or if `affinity` is known.
    logical_count: int | None = None
    physical_count: int | None = None
    #: The CPUs that this process may run on; None if the system has no affinity masks.
    affinity: frozenset[int] | None = None
    #: The output of ``sysctl hw machdep.cpu`` on macOS; empty on other systems.
    sysctl: Mapping[str, str] = field(default_factory=dict)


def live_host() -> Host:
    """Query the running system."""
    affinity = _read_affinity()
    # With affinity masks, the masks and sysfs are enough. psutil would read all of sysfs again on Linux.
    counts: tuple[int | None, ...] = (None, None)
    if affinity is None:
        import psutil  # type: ignore[import-untyped,unused-ignore]

        counts = psutil.cpu_count(), psutil.cpu_count(logical=False)
    logical_count, physical_count = counts
    return Host(
        architecture=platform.machine(),
        logical_count=logical_count,
        physical_count=physical_count,
        affinity=affinity,
        sysctl=parse_sysctl(_run_sysctl()) if platform.system() == "Darwin" else {},
    )


def parse_sysctl(text: str) -> dict[str, str]:
    """Parse lines such as ``hw.optional.arm.FEAT_BF16: 1``."""
    pairs = [line.partition(":") for line in text.splitlines()]
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def host_name(host: Host) -> str:
    """Return the processor's name on macOS, or an empty string."""
    return tidy_name(host.sysctl.get("machdep.cpu.brand_string", ""))


def host_instruction_sets(host: Host) -> frozenset[str]:
    """Return the features that macOS reports, by their names in Linux."""
    arm = [key for key, value in host.sysctl.items() if ".FEAT_" in key and value == "1"]
    features = [key.rpartition("FEAT_")[2] for key in arm]
    x86 = [host.sysctl.get(f"machdep.cpu.{key}", "") for key in ("features", "leaf7_features")]
    names = {APPLE_FEATURES.get(feature, feature.lower()) for feature in features}
    if host.sysctl.get("hw.optional.AdvSIMD") == "1":
        names.add("asimd")
    return frozenset(names | {_x86_feature(name) for name in " ".join(x86).split()})


def host_logical_cpus(host: Host) -> tuple[LogicalCpu, ...]:
    """Return as many CPUs as the system counts, numbered from 0.

    An Intel Mac reports the numbers of CPUs and cores but not the topology. macOS cannot bind threads, so ids have no
    meaning.
    """
    if apple := _apple_cpus(host.sysctl):
        return apple
    count = min(host.logical_count or 1, HIGHEST_CPU_ID)
    paired = 2 * (count - (host.physical_count or count))
    # Counts with more than two threads per core, or with fewer CPUs than cores, are ignored.
    paired = paired if 0 <= paired <= count else 0
    return tuple(LogicalCpu(cpu, cpu // 2 * 2 if cpu < paired else cpu) for cpu in range(count))


def _apple_cpus(sysctl: Mapping[str, str]) -> tuple[LogicalCpu, ...]:
    """Return the CPUs of each performance level. On macOS, the fastest level is first."""
    cpus: list[LogicalCpu] = []
    hybrid = _count(sysctl, "hw.perflevel1.logicalcpu") > 0
    kinds: tuple[CoreKind, CoreKind] = ("performance", "efficiency")
    for level, level_kind in enumerate(kinds):
        kind = level_kind if hybrid else None
        first, count = len(cpus), _count(sysctl, f"hw.perflevel{level}.logicalcpu")
        shared = _count(sysctl, f"hw.perflevel{level}.cpusperl2") or max(count, 1)
        for cpu in range(first, first + count):
            cache = cpu - (cpu - first) % shared
            cpus.append(LogicalCpu(cpu, cpu, last_level_cache=cache, core_kind=kind))
    return tuple(cpus)


def _count(sysctl: Mapping[str, str], key: str) -> int:
    return min(max(parse_number(sysctl.get(key)) or 0, 0), 1024)


def _x86_feature(name: str) -> str:
    return {"AVX1.0": "avx"}.get(name, name.lower().replace(".", "_"))


def _read_affinity() -> frozenset[int] | None:
    read = getattr(os, "sched_getaffinity", None)  # Linux and FreeBSD have it
    try:
        return frozenset(read(0)) if read else None
    except OSError:
        return None


def _run_sysctl() -> str:
    import subprocess  # 2 ms, on macOS alone

    command = ["/usr/sbin/sysctl", "hw", "machdep.cpu"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
