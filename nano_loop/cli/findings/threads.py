"""Findings about threads: variables that set their number, or bind them to CPUs."""

from __future__ import annotations

from collections.abc import Iterator

from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import Inspected
from nano_loop.cli.libraries import openmp_of
from nano_loop.cpu.partition import BINDING_VARIABLES
from nano_loop.cpu.tree import parse_number

_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_UNBOUND = ("", "false", "none", "disabled")  # values of variables that bind nothing


def thread_count(inspected: Inspected) -> Iterator[Finding]:
    """Find a number of threads that is not a number, that leaves cores idle, or that is more than there are."""
    best = inspected.machine.num_threads
    for name in _COUNTS:
        text = inspected.environ.get(name)
        if text is None or _is_torchruns(name, inspected):
            continue
        # OpenMP takes a number for each level of nesting, and the first is that of torch.
        count = parse_number(text.split(",")[0])
        if count is None or count < 1:
            yield Finding(
                f"{_id(name)}-unreadable",
                f"{name}={text} is set",
                "it is no number of threads, so the library prints a line and uses all CPUs",
                f"Set it to {best}, or unset it",
            )
        elif count < best:
            yield Finding(
                f"{_id(name)}-low",
                f"{name}={text} is set, and this process may use {best} cores",
                f"{_idle(best - count)} idle, since nano_loop keeps a number that a user has set",
                f"Unset {name}, or set it to {best}",
            )
        elif count > best:
            yield Finding(
                f"{_id(name)}-high",
                f"{name}={text} is set, and this process may use {best} core{'s' if best > 1 else ''}",
                "the threads wait for each other most of the time",
                f"Unset {name}, or set it to {best}",
            )


def quota_without_count(inspected: Inspected) -> Iterator[Finding]:
    """Find a quota that torch does not read."""
    machine = inspected.machine
    cores = len(machine.physical_cores)
    if machine.num_threads < cores and "OMP_NUM_THREADS" not in inspected.environ:
        yield Finding(
            "quota-threads",
            f"the quota allows {machine.num_threads} of {cores} cores, and OMP_NUM_THREADS is not set",
            "torch does not read quotas and starts a thread on each core, which takes up to a hundred times as long",
            'Run eval "$(nano-loop env)" before plain PyTorch; nano_loop itself lowers the number for a run',
        )


def binding(inspected: Inspected) -> Iterator[Finding]:
    """Find variables by which OpenMP binds threads to CPUs."""
    environ = inspected.environ
    for name in BINDING_VARIABLES:
        value = environ.get(name, "")
        if value.strip().lower() in _UNBOUND or _is_without_effect(name, inspected):
            continue
        yield Finding(
            "openmp-binding",
            f"{name}={value} is set",
            "OpenMP binds the main thread to one core, and workers of a DataLoader and other processes stay on it",
            f"Unset {name}: nano_loop binds the processes of a run itself",
        )


def _is_without_effect(name: str, inspected: Inspected) -> bool:
    """Whether a binding is that of a runtime which is not there, or is switched off by another variable."""
    if name == "KMP_AFFINITY":
        return "Intel" not in openmp_of(inspected.libraries)
    return name != "OMP_PROC_BIND" and inspected.environ.get("OMP_PROC_BIND", "").strip().lower() == "false"


def _is_torchruns(name: str, inspected: Inspected) -> bool:
    return "TORCHELASTIC_RUN_ID" in inspected.environ and inspected.environ[name] == "1"


def _idle(count: int) -> str:
    return "1 core stays" if count == 1 else f"{count} cores stay"


def _id(variable: str) -> str:
    return variable.lower().replace("_", "-")


FINDINGS = (thread_count, quota_without_count, binding)
