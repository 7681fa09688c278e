"""The checks of `doctor`, one function each: threads, variables, kernels, memory and instruction sets.

Each yields a `Finding` per problem that a user should know about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from nano_loop.cli.inspected import SHARED_MEMORY, Inspected
from nano_loop.cli.training_environment import preloaded
from nano_loop.config.environment import KERNELS
from nano_loop.config.options import Options
from nano_loop.cpu.partition import BINDING_VARIABLES
from nano_loop.cpu.tree import parse_number
from nano_loop.errors import NanoConfigError
from nano_loop.kernels.compiler import COMPILE, OFF
from nano_loop.runtime.objects.report import size


class Finding(NamedTuple):
    """A fact that the user should know."""

    id: str  # the name of the finding, stable across versions
    what: str  # the fact, with its value
    why: str
    advice: str
    #: Whether it slows down training or makes it fail. If not, it explains how this machine differs from a better one.
    hurts: bool = True


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in singular or plural."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


_UNBOUND = ("", "false", "none", "disabled")  # values of variables that bind nothing


def thread_counts(inspected: Inspected) -> Iterator[Finding]:
    """Find thread counts that are invalid, leave cores idle, or exceed the number of cores."""
    best, environ = inspected.machine.num_threads, inspected.environ
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text, id_ = environ.get(name), name.lower().replace("_", "-")
        if text is None or ("TORCHELASTIC_RUN_ID" in environ and text == "1"):  # torchrun has set it
            continue
        what, advice = f"{name}={text} is set", f"Unset {name}, or set it to {best}"
        # OpenMP accepts one number per nesting level. torch uses the first.
        count = parse_number(text.split(",")[0])
        if count is None or count < 1:
            why = "it is not a number of threads, so the library prints a warning and uses all CPUs"
            yield Finding(f"{id_}-unreadable", what, why, advice)
        elif count < best:
            idle = f"{counted(best - count, 'core')} stay{'s' * (best - count == 1)} idle"
            why = f"{idle}, since nano_loop keeps a number that the user has set"
            yield Finding(f"{id_}-low", f"{what}, and this process may use {best} cores", why, advice)
        elif count > best:
            what = f"{what}, and this process may use {counted(best, 'core')}"
            yield Finding(f"{id_}-high", what, "the threads wait for each other most of the time", advice)
    cores = len(inspected.machine.physical_cores)
    if best < cores and "OMP_NUM_THREADS" not in environ:
        yield Finding(
            "quota-threads",
            f"the quota allows {best} of {cores} cores, and OMP_NUM_THREADS is not set",
            "torch does not read quotas and starts a thread on each core, which takes up to a hundred times as long",
            'Run eval "$(nano-loop env)" before plain PyTorch; nano_loop itself lowers the number for a run',
        )


def bindings(inspected: Inspected) -> Iterator[Finding]:
    """Find variables that make OpenMP bind threads to CPUs."""
    values = {name: inspected.environ.get(name, "") for name in BINDING_VARIABLES}
    if not any("libiomp5" in library for library in preloaded(inspected.environ)):  # only Intel's OpenMP reads it
        values.pop("KMP_AFFINITY")
    if values["OMP_PROC_BIND"].strip().lower() == "false":  # disables the other variables of GNU's OpenMP
        values = {name: value for name, value in values.items() if name == "KMP_AFFINITY"}
    for name, value in values.items():
        if value.strip().lower() not in _UNBOUND:
            yield Finding(
                "openmp-binding",
                f"{name}={value} is set",
                "OpenMP binds the main thread to one core, and workers of a DataLoader and other processes stay on it",
                f"Unset {name}: nano_loop binds the processes of a run automatically",
            )


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "none")


_PRINTS = "the library prints a line for each operation"
#: Variables that slow down training: a predicate for the values that do, and their effect.
_SLOW: dict[str, tuple[Callable[[str], bool], str]] = {
    "ATEN_CPU_CAPABILITY": (
        lambda value: value.strip().lower() == "default",
        "torch's kernels do not use the CPU's vector instructions",
    ),
    **dict.fromkeys(("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKL_VERBOSE"), (_is_on, _PRINTS)),
    "TORCH_DISTRIBUTED_DEBUG": (
        lambda value: value.strip().upper() == "DETAIL",
        "torch.distributed compares every collective of all ranks before it runs",
    ),
    "TORCH_COMPILE_DEBUG": (_is_on, "torch.compile writes each graph to files"),
    "TORCHDYNAMO_DISABLE": (_is_on, "torch.compile compiles nothing"),
    "MALLOC_PERTURB_": (_is_on, "the C library fills memory at each allocation"),
    "PYTHONMALLOC": (lambda value: "debug" in value, "Python checks its memory at each allocation"),
}
# oneDNN does not use an instruction set if the value of its limit has none of these words.
_WORDS_FOR = {
    "amx_tile": ("AMX",),
    "avx512_bf16": ("BF16", "FP16", "AMX", "AVX10"),
    "avx512f": ("AVX512", "AVX10"),
    "avx2": ("AVX2", "AVX512", "AVX10"),
}


def refused_options(inspected: Inspected) -> Iterator[Finding]:
    """Find options in the environment that do not exist or have invalid values."""
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


def slow_variables(inspected: Inspected) -> Iterator[Finding]:
    """Find debugging variables of torch and its libraries, and limits on oneDNN's instruction sets."""
    reasons = {name: why for name, (is_bad, why) in _SLOW.items() if is_bad(inspected.environ.get(name, ""))}
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        value = inspected.environ.get(name, "").strip().upper()
        lost = [
            instruction_set
            for instruction_set, words in _WORDS_FOR.items()
            if instruction_set in inspected.machine.instruction_sets and not any(word in value for word in words)
        ]
        if lost and value not in ("", "DEFAULT", "ALL"):
            reasons[name] = f"oneDNN does not use {' and '.join(lost)}, which this CPU has"
    for name, why in reasons.items():
        yield Finding("slow-variable", f"{name}={inspected.environ[name]} is set", why, f"Unset {name}")


_LOST = "steps in bf16 take 9 to 58% longer without them (GPT-2 31%, ViT-S 9%, an LSTM 15%, on a Zen 4)"


def kernels_in_c(inspected: Inspected) -> Iterator[Finding]:
    """Find kernels in C that are missing or damaged, and a cache folder that cannot store compiled kernels."""
    kernels, choice, cache = inspected.kernels, inspected.environ.get(KERNELS), inspected.cache
    compiles = kernels is not None and kernels.level == COMPILE
    reason = "" if kernels is None or choice == OFF else kernels.reason
    if reason and kernels is not None and kernels.level is None:
        install = "Install gcc (Debian and Ubuntu: apt install gcc libc6-dev), or a wheel that has them"
        advice = f"Unset {KERNELS}" if choice else install
        yield Finding("no-kernels", f"there are no kernels in C: {reason}", _LOST, advice)
    elif reason:
        advice = "Install nano_loop again: pip install --force-reinstall --no-deps nano_loop"
        yield Finding("damaged-kernels", f"the package is damaged: {reason}", _LOST, advice)
    if cache is not None and not cache.is_writable:
        advice = "Make it writable only for this user (chmod 700), or set XDG_CACHE_HOME to a folder that is"
        if not (cache.path and cache.is_there):
            advice = "Set XDG_CACHE_HOME to a folder that only this user can write to"
        yield Finding(
            "cache-folder",
            f"{cache.path} is not writable for this user only" if cache.path else "this user has no home folder",
            f"each run measures operators again{', and compiles the kernels in C, which takes seconds' * compiles}",
            advice,
            hurts=compiles,
        )
    if cache is not None and not cache.is_executable and compiles:
        yield Finding(
            "cache-noexec",
            f"{cache.path} is on a file system that is mounted noexec",
            f"kernels that are compiled there cannot be loaded: {_LOST}",
            "Set XDG_CACHE_HOME to a folder elsewhere, or install a wheel that has the kernels",
        )


def memory(inspected: Inspected) -> Iterator[Finding]:
    """Find the small default size of a container's shared memory."""
    count = inspected.memory.shared
    if count is not None and count < 1 << 30:  # Docker's default is 64 MiB, which two workers of a loader can fill
        yield Finding(
            "shared-memory",
            f"{SHARED_MEMORY} has {size(count)}",
            "workers of a DataLoader exchange data there, and end with a bus error when it is full",
            "Enlarge it (docker run --shm-size=8g, Kubernetes: an emptyDir with medium: Memory)",
        )


def instruction_sets(inspected: Inspected) -> Iterator[Finding]:
    """Find an x86 CPU without AVX2, and a CPU without bf16 instructions."""
    machine = inspected.machine
    if machine.architecture == "x86_64" and machine.instruction_sets and "avx2" not in machine.instruction_sets:
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
