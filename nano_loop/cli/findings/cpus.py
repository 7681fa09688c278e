"""Findings about the CPU: its instruction sets, and why this process may use less than the machine has."""

from __future__ import annotations

from collections.abc import Iterator

from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import Inspected
from nano_loop.cpu import format_cpu_list


def no_vector_instructions(inspected: Inspected) -> Iterator[Finding]:
    """Find an x86 CPU without AVX2."""
    machine = inspected.machine
    if machine.architecture == "x86_64" and machine.instruction_sets and not inspected.has_any("avx2"):
        yield Finding(
            "no-avx2",
            f"the CPU ({machine.name}) has no AVX2",
            "torch's kernels fall back to code without wide vectors, which takes several times as long",
            "In a virtual machine, pass the host's CPU through (QEMU: -cpu host)",
        )


def no_fast_bf16(inspected: Inspected) -> Iterator[Finding]:
    """Find a CPU without bf16 instructions."""
    machine = inspected.machine
    if machine.instruction_sets and not machine.has_fast_bf16:
        yield Finding(
            "no-bf16",
            f"the CPU ({machine.name}) has no bf16 instructions",
            'precision="bf16" trains slower than fp32 here',
            'Train with precision=32 or "auto"',
            hurts=False,
        )


def affinity_is_narrow(inspected: Inspected) -> Iterator[Finding]:
    """Find an affinity mask that leaves CPUs out which the cpuset has."""
    online = {cpu.id for cpu in inspected.machine.logical_cpus}
    could = online.intersection(inspected.cpuset) or online
    left_out = could - (inspected.affinity or could)
    if left_out:
        yield Finding(
            "affinity",
            f"the affinity mask of this process leaves out CPUs {format_cpu_list(left_out)}",
            f"training uses {len(inspected.machine.physical_cores)} cores at most",
            "Start without taskset or numactl, or ask the scheduler for more CPUs (Slurm: --cpus-per-task)",
            hurts=False,
        )


def cpuset_is_narrow(inspected: Inspected) -> Iterator[Finding]:
    """Find a cpuset that leaves CPUs out which are online."""
    online = {cpu.id for cpu in inspected.machine.logical_cpus}
    left_out = online.difference(inspected.cpuset)
    if online.intersection(inspected.cpuset) and left_out:
        yield Finding(
            "cpuset",
            f"the cpuset of this container leaves out CPUs {format_cpu_list(left_out)}",
            f"training uses {len(inspected.machine.physical_cores)} cores at most",
            "Widen it (docker run --cpuset-cpus=..., Kubernetes: more CPUs in the pod's limits)",
            hurts=False,
        )


def quota_is_narrow(inspected: Inspected) -> Iterator[Finding]:
    """Find a quota below the cores that the process may run on."""
    machine = inspected.machine
    cores = len(machine.physical_cores)
    if machine.quota is not None and machine.quota < cores:
        yield Finding(
            "quota",
            f"the cgroup's quota is {machine.quota:g} CPUs, and the process may run on {cores} cores",
            f"{machine.num_threads} compute thread{'s' if machine.num_threads > 1 else ''} can run without a pause",
            "Raise it (docker run --cpus=..., Kubernetes: resources.limits.cpu), to a whole number of CPUs",
            hurts=False,
        )


FINDINGS = (no_vector_instructions, affinity_is_narrow, cpuset_is_narrow, quota_is_narrow, no_fast_bf16)
