"""The findings of `doctor`, one function each, by subject. Each yields nothing on a machine that has no such fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nano_loop.cli.findings import cpus, kernels, libraries, memory, packages, threads, variables
from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import Inspected

__all__ = ["FINDINGS", "Finding", "findings_of"]

#: In the order in which they are printed: first what a user can change at once.
FINDINGS: tuple[Callable[[Inspected], Iterator[Finding]], ...] = (
    *threads.FINDINGS,
    *variables.FINDINGS,
    *libraries.FINDINGS,
    *kernels.FINDINGS,
    *packages.FINDINGS,
    *memory.FINDINGS,
    *cpus.FINDINGS,
)


def findings_of(inspected: Inspected) -> list[Finding]:
    """Return all findings, those that hurt first."""
    findings = [finding for function in FINDINGS for finding in function(inspected)]
    return sorted(findings, key=lambda finding: not finding.hurts)
