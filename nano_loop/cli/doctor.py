"""The output of `nano-loop doctor`: the machine, the part that this process may use, and anything that slows training.

It does not import click, so that `python -m nano_loop doctor` works without it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from nano_loop.cli import as_text, doctor_checks
from nano_loop.cli.doctor_checks import Finding, counted
from nano_loop.cli.inspected import Inspected, inspect_system
from nano_loop.cpu import format_cpu_list, partition, process_counts
from nano_loop.errors import quoted
from nano_loop.kernels.compiler import COMPILE
from nano_loop.runtime.objects.report import size
from nano_loop.version import __version__

#: Findings are printed in this order: first those that a user can fix right away.
CHECKS: tuple[Callable[[Inspected], Iterator[Finding]], ...] = (
    *(doctor_checks.thread_counts, doctor_checks.bindings, doctor_checks.refused_options, doctor_checks.slow_variables),
    *(doctor_checks.kernels_in_c, doctor_checks.memory, doctor_checks.instruction_sets),
)
_LONGEST = 400  # maximum characters of a finding, which quotes the environment
#: Instruction sets that matter for training, by their names in Linux.
_INSTRUCTION_SETS = {
    "x86_64": ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"),
    "aarch64": ("asimd", "sve", "sve2", "bf16", "i8mm"),
}


def diagnose(as_json: bool, styled: Callable[..., str]) -> tuple[str, int]:
    """Return the text to print, in colours by `styled` as `click.style`, or JSON; and 1 if a finding hurts."""
    inspected = inspect_system()
    facts, findings = facts_of(inspected), findings_of(inspected)
    code = int(any(finding.hurts for finding in findings))
    if as_json:
        return as_text("doctor", facts=facts, findings=[finding._asdict() for finding in findings]), code
    return "\n".join(_lines(facts, findings, styled)), code


def findings_of(inspected: Inspected) -> list[Finding]:
    """Return all findings, with those that hurt first."""
    findings = [finding for check in CHECKS for finding in check(inspected)]
    return sorted(findings, key=lambda finding: not finding.hurts)


def facts_of(inspected: Inspected) -> dict[str, Any]:
    """Return the facts as plain data for JSON."""
    machine = inspected.machine
    kind = "aarch64" if machine.architecture in ("aarch64", "arm64") else "x86_64"
    return {
        "nano_loop": __version__,
        "python": platform.python_version(),
        "cpu": {
            "name": machine.name,
            "architecture": machine.architecture,
            "instruction_sets": [name for name in _INSTRUCTION_SETS[kind] if name in machine.instruction_sets],
            "fast_bf16": machine.has_fast_bf16,
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
            "shares": [[count, len(partition(machine, count)[0].cpus)] for count in process_counts(machine)],
        },
        "memory": asdict(inspected.memory),
        "kernels": None if inspected.kernels is None else inspected.kernels._asdict(),
        "cache": None if inspected.cache is None else inspected.cache._asdict(),
        "packages": dict(inspected.packages),
    }


def _lines(facts: Mapping[str, Any], findings: list[Finding], styled: Callable[..., str]) -> Iterator[str]:
    yield styled(f"nano_loop {facts['nano_loop']} · Python {facts['python']}", bold=True)
    for name, text in _table(facts):
        yield f"  {name:<13}  {text}"
    if output := (facts["kernels"] or {}).get("output"):
        yield "The compiler has printed:"
        yield from (f"  | {line}" for line in output.rstrip().splitlines())
    yield ""
    if not findings:
        yield styled("Nothing that slows down training was found.", fg="green")
    for finding in findings:
        label = styled("hurts", fg="red") if finding.hurts else styled("note ", fg="yellow")
        yield f"{label}  {styled(finding.id, bold=True)}: {quoted(finding.what, _LONGEST)}"
        yield f"       why: {finding.why}"
        yield f"       do:  {finding.advice}"


def _table(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts as rows of text."""
    cpu, usable, memory, kernels = (facts[name] for name in ("cpu", "usable", "memory", "kernels"))
    yield "CPU", f"{cpu['name']}, {cpu['architecture']}"
    yield "instructions", ", ".join(cpu["instruction_sets"]) or "unknown"
    counts = {"socket": "sockets", "NUMA node": "numa_nodes", "core": "cores", "logical CPU": "logical_cpus"}
    smt = "SMT" if cpu["logical_cpus"] > cpu["cores"] else "no SMT"
    yield "cores", f"{', '.join(counted(cpu[name], noun) for noun, name in counts.items())} ({smt})"
    quota = "no quota" if usable["quota"] is None else f"quota {usable['quota']:g} CPUs"
    cpus = f"CPUs {format_cpu_list(usable['logical_cpus'])} of {cpu['logical_cpus']}"
    yield "usable", f"{cpus}, {counted(usable['cores'], 'core')}, {quota}: {counted(usable['num_threads'], 'thread')}"
    shares = ", ".join(f"{count} × {cores}" for count, cores in usable["shares"])
    yield "processes", f"{shares} cores: nano-loop tune --num-processes auto --split-batches finds the fastest"
    if memory["total"] is None:
        yield "memory", "unknown"
    else:
        available = "" if memory["available"] is None else f", {size(memory['available'])} available"
        limit = "no limit" if memory["limit"] is None else f"limit {size(memory['limit'])}"
        yield "memory", f"{size(memory['total'])}{available}, {limit}"
    left = sorted((count, name) for name, count in memory["left"].items())
    yield "can allocate", ", ".join(f"{size(count)} of {name}" for count, name in left) or "no known limit"
    yield "shared memory", "unknown" if memory["shared"] is None else size(memory["shared"])
    if kernels is not None and kernels["level"] is None:
        yield "kernels in C", f"none: {kernels['reason']}"
    elif kernels is not None:
        yield "kernels in C", f"{kernels['level']}, {kernels['origin']}".removeprefix(f"{COMPILE}, ")
    if facts["cache"] is not None:
        yield "cache folder", facts["cache"]["path"] or "none"
    yield "packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items()) or "none"
