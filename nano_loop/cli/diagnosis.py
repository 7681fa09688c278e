"""What `nano-loop doctor` prints: what this machine offers, what this process may use of it, and what slows training.

It does without the command line's library, which `python -m nano_loop doctor` needs not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nano_loop.cli.findings import Finding, findings_of
from nano_loop.cli.findings.memory import in_words
from nano_loop.cli.inspected import Inspected, inspect_system, python_version
from nano_loop.cli.kernels_inspected import Kernels
from nano_loop.cli.libraries import openmp_of
from nano_loop.cli.output import as_text
from nano_loop.cli.torch_inspected import inspect_torch
from nano_loop.cpu import format_cpu_list
from nano_loop.cpu.glibc import allocators_of
from nano_loop.kernels.compiler import COMPILE
from nano_loop.version import __version__

#: Names of instruction sets that matter to training, as Linux has them.
INSTRUCTION_SETS = {
    "x86_64": ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16"),
    "aarch64": ("asimd", "asimdhp", "sve", "sve2", "bf16", "i8mm"),
}
_WIDTH = len("shared memory")


def diagnose(as_json: bool, with_torch: bool, styled: Callable[..., str]) -> tuple[str, int]:
    """Return what to print, and the exit code: 1 if a finding hurts, and 0 otherwise.

    Parameters
    ----------
    as_json : bool
        Whether it is JSON.
    with_torch : bool
        Whether torch is imported, in another process.
    styled : callable
        Returns a text with colours; it takes what `click.style` does.
    """
    inspected = inspect_system(torch=inspect_torch() if with_torch else None)
    findings = findings_of(inspected)
    code = int(any(finding.hurts for finding in findings))
    if as_json:
        listed = [finding.as_dict() for finding in findings]
        return as_text("doctor", facts=facts_of(inspected), findings=listed), code
    return "\n".join(_lines(inspected, findings, styled)), code


def facts_of(inspected: Inspected) -> dict[str, Any]:
    """Return what was read, as plain data for JSON."""
    machine, memory = inspected.machine, inspected.memory
    return {
        "nano_loop": __version__,
        "python": python_version(),
        "cpu": {
            "name": machine.name,
            "architecture": machine.architecture,
            "instruction_sets": _instruction_sets(inspected),
            "fast_bf16": machine.has_fast_bf16,
            "fast_fp16": machine.has_fast_fp16,
            "sockets": len({cpu.package for cpu in machine.logical_cpus}),
            "numa_nodes": len({cpu.numa_node for cpu in machine.logical_cpus}),
            "cores": len({cpu.physical_core for cpu in machine.logical_cpus}),
            "logical_cpus": len(machine.logical_cpus),
        },
        "usable": {
            "logical_cpus": list(machine.allowed),
            "cores": len(machine.physical_cores),
            "affinity": None if inspected.affinity is None else sorted(inspected.affinity),
            "cpuset": list(inspected.cpuset) or None,
            "quota": machine.quota,
            "num_threads": machine.num_threads,
        },
        "memory": {
            "total": memory.total,
            "available": memory.available,
            "limit": memory.limit,
            "shared": memory.shared,
            "huge_pages": memory.huge_pages or None,
        },
        "kernels": None if inspected.kernels is None else inspected.kernels._asdict(),
        "cache": None if inspected.cache is None else inspected.cache._asdict(),
        "libraries": {
            "allocators": list(allocators_of(inspected.libraries)),
            "openmp": list(openmp_of(inspected.libraries)),
        },
        "packages": dict(inspected.packages),
        "torch": dict(inspected.torch) or None,
    }


def _lines(inspected: Inspected, findings: list[Finding], styled: Callable[..., str]) -> Iterator[str]:
    yield styled(f"nano_loop {__version__} · Python {python_version()}", bold=True)
    for name, text in _table(inspected):
        yield f"  {name:<{_WIDTH}}  {text}"
    if inspected.kernels is not None and inspected.kernels.output:
        yield "The compiler has printed:"
        yield from (f"  | {line}" for line in inspected.kernels.output.rstrip().splitlines())
    yield ""
    if not findings:
        yield styled("Nothing was found that slows training down.", fg="green")
    for finding in findings:
        label = styled("hurts", fg="red") if finding.hurts else styled("note ", fg="yellow")
        yield f"{label}  {styled(finding.id, bold=True)}: {finding.what}"
        yield f"       why: {finding.why}"
        yield f"       do:  {finding.advice}"


def _table(inspected: Inspected) -> Iterator[tuple[str, str]]:
    machine = inspected.machine
    yield "CPU", f"{machine.name}, {machine.architecture}"
    yield "instructions", ", ".join(_instruction_sets(inspected)) or "unknown"
    yield "cores", _cores(inspected)
    yield "usable", _usable(inspected)
    yield "memory", _memory(inspected)
    yield "shared memory", "unknown" if inspected.memory.shared is None else in_words(inspected.memory.shared)
    yield "huge pages", inspected.memory.huge_pages or "unknown"
    yield "allocator", " and ".join(allocators_of(inspected.libraries)) or "that of the C library"
    yield "OpenMP", _openmp(inspected)
    if inspected.kernels is not None:
        yield "kernels in C", _kernels(inspected.kernels)
    if inspected.cache is not None:
        yield "cache folder", inspected.cache.path or "none"
    yield "packages", ", ".join(f"{name} {version}" for name, version in inspected.packages.items()) or "none"
    if inspected.torch:
        said = inspected.torch
        yield "torch", f"oneDNN {said['onednn']}, {said['cpu_capability']}, {said['num_threads']} threads"


def _instruction_sets(inspected: Inspected) -> list[str]:
    kind = "aarch64" if inspected.machine.architecture in ("aarch64", "arm64") else "x86_64"
    return [name for name in INSTRUCTION_SETS[kind] if inspected.has_any(name)]


def _cores(inspected: Inspected) -> str:
    cpus = inspected.machine.logical_cpus
    cores = len({cpu.physical_core for cpu in cpus})
    parts = [
        _counted(len({cpu.package for cpu in cpus}), "socket"),
        _counted(len({cpu.numa_node for cpu in cpus}), "NUMA node"),
        _counted(cores, "core"),
        f"{_counted(len(cpus), 'logical CPU')} ({'SMT' if len(cpus) > cores else 'no SMT'})",
    ]
    return ", ".join(parts)


def _usable(inspected: Inspected) -> str:
    machine = inspected.machine
    quota = "no quota" if machine.quota is None else f"quota {machine.quota:g} CPUs"
    cpus = f"CPUs {format_cpu_list(machine.allowed)} of {len(machine.logical_cpus)}"
    cores, threads = _counted(len(machine.physical_cores), "core"), _counted(machine.num_threads, "thread")
    return f"{cpus}, {cores}, {quota}: {threads}"


def _memory(inspected: Inspected) -> str:
    memory = inspected.memory
    if memory.total is None:
        return "unknown"
    available = "" if memory.available is None else f", {in_words(memory.available)} available"
    limit = "no limit" if memory.limit is None else f"limit {in_words(memory.limit)}"
    return f"{in_words(memory.total)}{available}, {limit}"


def _openmp(inspected: Inspected) -> str:
    runtimes = openmp_of(inspected.libraries)
    if runtimes:
        return " and ".join(runtimes)
    return "none is loaded" if inspected.torch else "none is loaded before torch (--torch shows torch's)"


def _kernels(kernels: Kernels) -> str:
    if kernels.level is None:
        return f"none: {kernels.reason}"
    return kernels.origin if kernels.level == COMPILE else f"{kernels.level}, {kernels.origin}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
