"""What the running system says of itself, for what /proc and /sys do not tell: all of macOS and Windows."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped,unused-ignore]

from nano_loop.cpu.cpu_list import HIGHEST_CPU_ID
from nano_loop.cpu.cpuinfo import tidy_name
from nano_loop.cpu.machine import CoreKind, LogicalCpu
from nano_loop.cpu.tree import parse_number

# Where Apple's name for a feature is not the one that Linux prints on the same chip.
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
    """The live facts that `read_machine` cannot read from files; tests hand in their own.

    Attributes
    ----------
    architecture : str
        As `platform.machine` says it; empty where unknown.
    logical_count, physical_count : int or None
        How many CPUs and cores there are, as psutil counts them; None where unknown, or where `affinity` is known.
    affinity : frozenset of int or None
        The CPUs that this process may run on; None where the system has no such mask.
    sysctl : mapping of str to str
        What ``sysctl hw machdep.cpu`` prints on macOS; empty elsewhere.
    """

    architecture: str = ""
    logical_count: int | None = None
    physical_count: int | None = None
    affinity: frozenset[int] | None = None
    sysctl: Mapping[str, str] = field(default_factory=dict)


def live_host() -> Host:
    """Ask the running system."""
    affinity = _read_affinity()
    # Where there are masks, they and sysfs tell the CPUs. psutil, on Linux, would read all of sysfs once more.
    counted = affinity is None
    return Host(
        architecture=platform.machine(),
        logical_count=psutil.cpu_count() if counted else None,
        physical_count=psutil.cpu_count(logical=False) if counted else None,
        affinity=affinity,
        sysctl=parse_sysctl(_run_sysctl()) if platform.system() == "Darwin" else {},
    )


def parse_sysctl(text: str) -> dict[str, str]:
    """Read lines such as ``hw.optional.arm.FEAT_BF16: 1``."""
    pairs = [line.partition(":") for line in text.splitlines()]
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def host_name(host: Host) -> str:
    """Return the processor's name as macOS knows it, or an empty string."""
    return tidy_name(host.sysctl.get("machdep.cpu.brand_string", ""))


def host_instruction_sets(host: Host) -> frozenset[str]:
    """Return macOS's features by the names that Linux has for them."""
    arm = [key for key, value in host.sysctl.items() if ".FEAT_" in key and value == "1"]
    features = [key.rpartition("FEAT_")[2] for key in arm]
    x86 = [host.sysctl.get(f"machdep.cpu.{key}", "") for key in ("features", "leaf7_features")]
    names = {APPLE_FEATURES.get(feature, feature.lower()) for feature in features}
    if host.sysctl.get("hw.optional.AdvSIMD") == "1":
        names.add("asimd")
    return frozenset(names | {_x86_feature(name) for name in " ".join(x86).split()})


def host_logical_cpus(host: Host) -> tuple[LogicalCpu, ...]:
    """Return as many CPUs as the system counts, numbered as most systems number them.

    macOS and Windows say how many CPUs there are and not where they sit. macOS cannot bind threads at all,
    so its ids only count. Windows puts the siblings of a core side by side, and a hybrid's cores without
    siblings last.
    """
    if apple := _apple_cpus(host.sysctl):
        return apple
    count = min(host.logical_count or 1, HIGHEST_CPU_ID)
    paired = 2 * (count - (host.physical_count or count))
    # More than two threads a core, or fewer CPUs than cores: such counts are not believed.
    paired = paired if 0 <= paired <= count else 0
    return tuple(LogicalCpu(cpu, cpu // 2 * 2 if cpu < paired else cpu) for cpu in range(count))


def _apple_cpus(sysctl: Mapping[str, str]) -> tuple[LogicalCpu, ...]:
    """Return the CPUs of each performance level, of which macOS puts the fastest first."""
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
    command = ["/usr/sbin/sysctl", "hw", "machdep.cpu"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
