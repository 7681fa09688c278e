"""Findings about environment variables that make torch slower, or that nano_loop refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import Inspected
from nano_loop.config.exports import is_exported
from nano_loop.config.options import Options
from nano_loop.cpu.glibc import USERS_OWN
from nano_loop.errors import NanoConfigError

_OFF = ("", "0", "false", "off", "none")


def _is_on(value: str) -> bool:
    return value.strip().lower() not in _OFF


def _has_any(value: str, words: tuple[str, ...]) -> bool:
    return any(word in value for word in words)


class Variable(NamedTuple):
    """A variable that makes training slower."""

    names: tuple[str, ...]
    is_bad: Callable[[str], bool]  # whether a value is one of those that do
    why: str  # what it does


SLOW = (
    Variable(
        ("ATEN_CPU_CAPABILITY",),
        lambda value: value.strip().lower() == "default",
        "torch's kernels do not use the CPU's vector instructions",
    ),
    Variable(("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKL_VERBOSE"), _is_on, "the library prints a line for each operation"),
    Variable(
        ("TORCH_DISTRIBUTED_DEBUG",),
        lambda value: value.strip().upper() == "DETAIL",
        "torch.distributed compares every collective of all ranks before it runs",
    ),
    Variable(("TORCH_COMPILE_DEBUG",), _is_on, "torch.compile writes each graph to files"),
    Variable(("TORCHDYNAMO_DISABLE",), _is_on, "torch.compile compiles nothing"),
    Variable(("MALLOC_PERTURB_",), _is_on, "the C library fills memory at each allocation"),
    Variable(("PYTHONMALLOC",), lambda value: "debug" in value, "Python checks its memory at each allocation"),
)

_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# An instruction set is lost if the value has none of these words.
_WORDS_FOR = {
    "amx_tile": ("AMX",),
    "avx512_bf16": ("BF16", "FP16", "AMX", "AVX10"),
    "avx512f": ("AVX512", "AVX10"),
    "avx2": ("AVX2", "AVX512", "AVX10"),
}


def limited_instruction_sets(inspected: Inspected) -> Iterator[Finding]:
    """Find a limit by which oneDNN leaves out instruction sets of this CPU."""
    for name in _ISA_LIMITS:
        value = inspected.environ.get(name, "").strip().upper()
        if value in ("", "DEFAULT", "ALL"):
            continue
        lost = [
            instruction_set
            for instruction_set, words in _WORDS_FOR.items()
            if inspected.has_any(instruction_set) and not _has_any(value, words)
        ]
        if lost:
            why = f"oneDNN does not use {' and '.join(lost)}, which this CPU has"
            yield Finding("slow-variable", f"{name}={inspected.environ[name]} is set", why, f"Unset {name}")


def slow_variables(inspected: Inspected) -> Iterator[Finding]:
    """Find variables of torch and its libraries that are for debugging."""
    for variable in SLOW:
        for name in variable.names:
            value = inspected.environ.get(name)
            if value is not None and variable.is_bad(value):
                yield Finding("slow-variable", f"{name}={value} is set", variable.why, f"Unset {name}")


def refused_options(inspected: Inspected) -> Iterator[Finding]:
    """Find options in the environment that do not exist, or whose values are not allowed."""
    try:
        Options.from_call({}, inspected.environ)
    except NanoConfigError as error:
        for line in str(error).splitlines():
            yield Finding(
                "refused-option",
                f"nano_loop refuses an option in the environment: {line.rstrip('.')}",
                "each run ends with an error",
                "Correct the variable, or unset it",
            )


def glibc_settings(inspected: Inspected) -> Iterator[Finding]:
    """Find settings of glibc's allocator that are the user's own."""
    for name in USERS_OWN:
        value = inspected.environ.get(name)
        of_malloc = name != "GLIBC_TUNABLES" or "glibc.malloc" in (value or "")
        if value is not None and of_malloc and not is_exported(name, inspected.environ):
            yield Finding(
                "malloc-settings",
                f"{name}={value} is set",
                "the allocator step of nano_loop is skipped, and what you set stays in force",
                f"Unset {name}, unless you have measured that it is faster",
                hurts=False,
            )


def few_arenas(inspected: Inspected) -> Iterator[Finding]:
    """Find a number of glibc's arenas that was set to save memory."""
    value = inspected.environ.get("MALLOC_ARENA_MAX", "")
    if value.strip() in ("1", "2"):
        yield Finding(
            "malloc-arena-max",
            f"MALLOC_ARENA_MAX={value} is set",
            "threads that allocate at the same time wait for each other",
            "Unset MALLOC_ARENA_MAX, unless memory is short",
            hurts=False,
        )


FINDINGS = (refused_options, slow_variables, limited_instruction_sets, glibc_settings, few_arenas)
