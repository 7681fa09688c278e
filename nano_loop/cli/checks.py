"""The checks of `doctor` that concern the machine: threads, memory and CPUs. Each yields nothing where all is well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nano_loop.cli.inspected import SHARED_MEMORY, Inspected
from nano_loop.cli.libraries import openmp_of
from nano_loop.cpu import format_cpu_list
from nano_loop.cpu.partition import BINDING_VARIABLES
from nano_loop.cpu.tree import parse_number


class Finding(NamedTuple):
    """One thing that a user should know."""

    id: str  # the name of the finding, which stays the same between versions
    what: str  # what was found, with its value
    why: str
    advice: str
    #: Whether it makes training slower or fail. If not, it explains how this machine differs from a better one.
    hurts: bool = True


def in_words(count: int) -> str:
    """Return a number of bytes in a unit that people read."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


_UNBOUND = ("", "false", "none", "disabled")  # values of variables that bind nothing


def thread_counts(inspected: Inspected) -> Iterator[Finding]:
    """Find a number of threads that leaves cores idle, that is more than there are, or that is none."""
    best, environ = inspected.machine.num_threads, inspected.environ
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text, id_ = environ.get(name), name.lower().replace("_", "-")
        if text is None or ("TORCHELASTIC_RUN_ID" in environ and text == "1"):  # torchrun has set it
            continue
        # OpenMP takes a number for each level of nesting, and the first is that of torch.
        count = parse_number(text.split(",")[0])
        if count is None or count < 1:
            yield Finding(
                f"{id_}-unreadable",
                f"{name}={text} is set",
                "it is no number of threads, so the library prints a line and uses all CPUs",
                f"Set it to {best}, or unset it",
            )
        elif count < best:
            yield Finding(
                f"{id_}-low",
                f"{name}={text} is set, and this process may use {best} cores",
                f"{counted(best - count, 'core')} stay{'s' * (best - count == 1)} idle, since nano_loop keeps a number "
                "that a user has set",
                f"Unset {name}, or set it to {best}",
            )
        elif count > best:
            yield Finding(
                f"{id_}-high",
                f"{name}={text} is set, and this process may use {counted(best, 'core')}",
                "the threads wait for each other most of the time",
                f"Unset {name}, or set it to {best}",
            )
    cores = len(inspected.machine.physical_cores)
    if best < cores and "OMP_NUM_THREADS" not in environ:
        yield Finding(
            "quota-threads",
            f"the quota allows {best} of {cores} cores, and OMP_NUM_THREADS is not set",
            "torch does not read quotas and starts a thread on each core, which takes up to a hundred times as long",
            'Run eval "$(nano-loop env)" before plain PyTorch; nano_loop itself lowers the number for a run',
        )


def bindings(inspected: Inspected) -> Iterator[Finding]:
    """Find variables by which OpenMP binds threads to CPUs."""
    values = {name: inspected.environ.get(name, "") for name in BINDING_VARIABLES}
    if "Intel" not in openmp_of(inspected.libraries):
        values.pop("KMP_AFFINITY", None)
    if values["OMP_PROC_BIND"].strip().lower() == "false":  # this switches off GNU's others
        values = {name: value for name, value in values.items() if name == "KMP_AFFINITY"}
    for name, value in values.items():
        if value.strip().lower() not in _UNBOUND:
            yield Finding(
                "openmp-binding",
                f"{name}={value} is set",
                "OpenMP binds the main thread to one core, and workers of a DataLoader and other processes stay on it",
                f"Unset {name}: nano_loop binds the processes of a run itself",
            )


def memory(inspected: Inspected) -> Iterator[Finding]:
    """Find a container's default size of shared memory, memory that others use, and a limit of the cgroup."""
    size, limit = inspected.memory.shared, inspected.memory.limit
    total, available = inspected.memory.total, inspected.memory.available
    if size is not None and size < 1 << 30:  # Docker's default is 64 MiB, which two workers of a loader can fill
        yield Finding(
            "shared-memory",
            f"{SHARED_MEMORY} has {in_words(size)}",
            "workers of a DataLoader exchange data there, and end with a bus error when it is full",
            "Enlarge it (docker run --shm-size=8g, Kubernetes: an emptyDir with medium: Memory)",
        )
    if total and available is not None and available < 0.05 * total:
        yield Finding(
            "memory-short",
            f"{in_words(available)} of {in_words(total)} memory are available",
            "a training that needs more is swapped out or killed",
            "End other programs, or use a smaller batch",
        )
    if limit is not None:
        machine = f", and the machine has {in_words(total)}" if total is not None else ""
        yield Finding(
            "memory-limit",
            f"the cgroup's memory limit is {in_words(limit)}{machine}",
            "the kernel kills a process that exceeds it, and files in shared memory count as well",
            "Raise it (docker run --memory=..., Kubernetes: resources.limits.memory) if training is killed",
            hurts=False,
        )


def instruction_sets(inspected: Inspected) -> Iterator[Finding]:
    """Find an x86 CPU without AVX2, and a CPU without bf16 instructions."""
    machine = inspected.machine
    if machine.architecture == "x86_64" and machine.instruction_sets and not inspected.has_any("avx2"):
        yield Finding(
            "no-avx2",
            f"the CPU ({machine.name}) has no AVX2",
            "torch's kernels fall back to code without wide vectors, which takes several times as long",
            "In a virtual machine, pass the host's CPU through (QEMU: -cpu host)",
        )
    if machine.instruction_sets and not machine.has_fast_bf16:
        yield Finding(
            "no-bf16",
            f"the CPU ({machine.name}) has no bf16 instructions",
            'precision="bf16" trains slower than fp32 here',
            'Train with precision=32 or "auto"',
            hurts=False,
        )


def usable_cpus(inspected: Inspected) -> Iterator[Finding]:
    """Find an affinity mask, a cpuset or a quota that leaves CPUs out."""
    machine, cpuset = inspected.machine, inspected.cpuset
    cores, online = len(machine.physical_cores), {cpu.id for cpu in machine.logical_cpus}
    at_most = f"training uses {cores} cores at most"
    could = online.intersection(cpuset) or online
    if left_out := could - (inspected.affinity or could):
        yield Finding(
            "affinity",
            f"the affinity mask of this process leaves out CPUs {format_cpu_list(left_out)}",
            at_most,
            "Start without taskset or numactl, or ask the scheduler for more CPUs (Slurm: --cpus-per-task)",
            hurts=False,
        )
    if left_out := online - could:
        yield Finding(
            "cpuset",
            f"the cpuset of this container leaves out CPUs {format_cpu_list(left_out)}",
            at_most,
            "Widen it (docker run --cpuset-cpus=..., Kubernetes: more CPUs in the pod's limits)",
            hurts=False,
        )
    if machine.quota is not None and machine.quota < cores:
        yield Finding(
            "quota",
            f"the cgroup's quota is {machine.quota:g} CPUs, and the process may run on {cores} cores",
            f"{counted(machine.num_threads, 'compute thread')} can run without a pause",
            "Raise it (docker run --cpus=..., Kubernetes: resources.limits.cpu), to a whole number of CPUs",
            hurts=False,
        )
