"""Findings about shared libraries: allocators and OpenMP runtimes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import Inspected
from nano_loop.cli.libraries import openmp_of, preloaded
from nano_loop.cpu.glibc import allocators_of


def preload_is_missing(inspected: Inspected) -> Iterator[Finding]:
    """Find an entry of LD_PRELOAD that the loader has left out."""
    loaded = {Path(library).name for library in inspected.libraries}
    for entry in preloaded(inspected.environ):
        # A process has the file behind a link. On a recorded machine, its name begins like that of the link.
        stems = {Path(path).name.partition(".so")[0] for path in (entry, os.path.realpath(entry))}
        if loaded and not any(name.startswith(tuple(stems)) for name in loaded):
            yield Finding(
                "preload-missing",
                f"LD_PRELOAD names {entry}, which is not loaded",
                "programs start without it, and each prints a line about it",
                "Install the library, or take it out of LD_PRELOAD",
            )


def two_openmp_runtimes(inspected: Inspected) -> Iterator[Finding]:
    """Find two OpenMP runtimes in one process, of which neither was preloaded to replace the other."""
    runtimes = openmp_of(inspected.libraries)
    # Intel's and LLVM's runtimes have GNU's functions as well, so the one that is loaded first serves all.
    replacing = {"Intel", "LLVM"}.intersection(openmp_of(preloaded(inspected.environ)))
    if len(runtimes) > 1 and not replacing:
        yield Finding(
            "two-openmp",
            f"the OpenMP runtimes of {' and '.join(runtimes)} are loaded in one process",
            "each has threads, which wait for cores that the other's threads keep busy, and some programs abort",
            "Install torch and NumPy from one source, or preload one runtime (nano-loop env --intel-openmp)",
        )


def two_allocators(inspected: Inspected) -> Iterator[Finding]:
    """Find two allocators in one process."""
    allocators = allocators_of(inspected.libraries)
    if len(allocators) > 1:
        yield Finding(
            "two-allocators",
            f"the allocators {' and '.join(allocators)} are loaded in one process",
            "only the first one is used, and memory that one allocates and the other frees ends the process",
            "Leave one of them in LD_PRELOAD",
        )


FINDINGS = (preload_is_missing, two_openmp_runtimes, two_allocators)
