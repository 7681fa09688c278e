"""The checks of `doctor`, a function each: of threads and variables, libraries and packages, memory and CPUs.

Each yields a `Finding` for what a user should know, and nothing where all is well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from nano_loop.cli.inspected import SHARED_MEMORY, Inspected
from nano_loop.cli.libraries import openmp_of, preloaded
from nano_loop.config.environment import KERNELS
from nano_loop.config.exports import is_exported
from nano_loop.config.options import Options
from nano_loop.cpu import format_cpu_list
from nano_loop.cpu.glibc import USERS_OWN, allocators_of
from nano_loop.cpu.partition import BINDING_VARIABLES
from nano_loop.cpu.tree import parse_number
from nano_loop.errors import NanoConfigError
from nano_loop.kernels.compiler import COMPILE, OFF


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
        what, advice = f"{name}={text} is set", f"Unset {name}, or set it to {best}"
        # OpenMP takes a number for each level of nesting, and the first is that of torch.
        count = parse_number(text.split(",")[0])
        if count is None or count < 1:
            why = "it is not a number of threads, so the library prints a line and uses all CPUs"
            yield Finding(f"{id_}-unreadable", what, why, advice)
        elif count < best:
            idle = f"{counted(best - count, 'core')} stay{'s' * (best - count == 1)} idle"
            why = f"{idle}, since nano_loop keeps a number that a user has set"
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


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "none")


_PRINTS = "the library prints a line for each operation"
#: Variables that make training slower: whether a value does, and what it does.
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
# An instruction set is lost to oneDNN if the value of its limit has none of these words.
_WORDS_FOR = {
    "amx_tile": ("AMX",),
    "avx512_bf16": ("BF16", "FP16", "AMX", "AVX10"),
    "avx512f": ("AVX512", "AVX10"),
    "avx2": ("AVX2", "AVX512", "AVX10"),
}


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


def slow_variables(inspected: Inspected) -> Iterator[Finding]:
    """Find variables of torch and its libraries that are for debugging, and limits of oneDNN's instruction sets."""
    reasons = {name: why for name, (is_bad, why) in _SLOW.items() if is_bad(inspected.environ.get(name, ""))}
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        value = inspected.environ.get(name, "").strip().upper()
        lost = [
            instruction_set
            for instruction_set, words in _WORDS_FOR.items()
            if inspected.has_any(instruction_set) and not any(word in value for word in words)
        ]
        if lost and value not in ("", "DEFAULT", "ALL"):
            reasons[name] = f"oneDNN does not use {' and '.join(lost)}, which this CPU has"
    for name, why in reasons.items():
        yield Finding("slow-variable", f"{name}={inspected.environ[name]} is set", why, f"Unset {name}")


def settings_of_malloc(inspected: Inspected) -> Iterator[Finding]:
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
    arenas = inspected.environ.get("MALLOC_ARENA_MAX", "")
    if arenas.strip() in ("1", "2"):
        yield Finding(
            "malloc-arena-max",
            f"MALLOC_ARENA_MAX={arenas} is set",
            "threads that allocate at the same time wait for each other",
            "Unset MALLOC_ARENA_MAX, unless memory is short",
            hurts=False,
        )


_LOST = "steps in bf16 take 9 to 58% longer without them (GPT-2 31%, ViT-S 9%, an LSTM 15%, on a Zen 4)"
_IPEX = "intel-extension-for-pytorch"


def libraries(inspected: Inspected) -> Iterator[Finding]:
    """Find an entry of LD_PRELOAD that is not loaded, two OpenMP runtimes, and two allocators."""
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
    runtimes, allocators = openmp_of(inspected.libraries), allocators_of(inspected.libraries)
    # Intel's and LLVM's runtimes have GNU's functions as well, so one of them that is preloaded serves all.
    if len(runtimes) > 1 and not {"Intel", "LLVM"}.intersection(openmp_of(preloaded(inspected.environ))):
        yield Finding(
            "two-openmp",
            f"the OpenMP runtimes of {' and '.join(runtimes)} are loaded in one process",
            "each has threads, which wait for cores that the other's threads keep busy, and some programs abort",
            "Install torch and NumPy from one source, or preload one runtime (nano-loop env --intel-openmp)",
        )
    if len(allocators) > 1:
        yield Finding(
            "two-allocators",
            f"the allocators {' and '.join(allocators)} are loaded in one process",
            "only the first one is used, and memory that one allocates and the other frees ends the process",
            "Keep one of them in LD_PRELOAD",
        )


def kernels_in_c(inspected: Inspected) -> Iterator[Finding]:
    """Find kernels in C that are missing or damaged, and a cache folder that those to be compiled cannot be kept in."""
    kernels, choice, cache = inspected.kernels, inspected.environ.get(KERNELS), inspected.cache
    compiles = kernels is not None and kernels.level == COMPILE
    if kernels is not None and kernels.level is None and choice == OFF:
        what, advice = f"{KERNELS}=off turns the kernels in C off", f"Unset {KERNELS}"
        yield Finding("kernels-off", what, _LOST, advice, hurts=False)
    elif kernels is not None and kernels.level is None:
        install = "Install gcc (Debian and Ubuntu: apt install gcc libc6-dev), or a wheel that has them"
        advice = f"Unset {KERNELS}" if choice else install
        yield Finding("no-kernels", f"there are no kernels in C: {kernels.reason}", _LOST, advice)
    elif kernels is not None and kernels.reason:
        advice = "Install nano_loop again: pip install --force-reinstall --no-deps nano_loop"
        yield Finding("damaged-kernels", f"the package is damaged: {kernels.reason}", _LOST, advice)
    if cache is not None and not cache.is_writable:
        advice = "Make it writable for this user alone (chmod 700), or set XDG_CACHE_HOME to a folder that is"
        if not (cache.path and cache.is_there):
            advice = "Set XDG_CACHE_HOME to a folder that this user alone can write to"
        yield Finding(
            "cache-folder",
            f"{cache.path} cannot be written by this user alone" if cache.path else "this user has no home folder",
            f"each run measures operators anew{', and compiles the kernels in C, which takes seconds' * compiles}",
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


def packages(inspected: Inspected) -> Iterator[Finding]:
    """Find packages that are missing, that do not fit each other or this machine, or that attackers have published."""
    torch, ipex = inspected.packages.get("torch", ""), inspected.packages.get(_IPEX, "")
    if not torch:
        yield Finding(
            "no-torch",
            "torch is not installed in this Python",
            "nano_loop trains with it",
            "Install it (pip install torch), or use the Python that has it",
        )
    if inspected.unused_cuda:
        yield Finding(
            "cuda-torch",
            f"the installed torch is built for CUDA {inspected.unused_cuda}, and there is no GPU",
            "it takes gigabytes on the disk and starts later; it trains on the CPU as fast as a build for CPUs",
            "Install torch's build for CPUs, by the line that pytorch.org shows for it",
            hurts=False,
        )
    if _minor(torch) == "2.8" and not ipex:  # torch hands out its own kernels from the next version on
        yield Finding(
            "old-torch",
            f"torch {torch} is installed",
            "fast_activation, fast_convolution, fast_linear, fast_norm and fast_rnn need torch 2.9 or later",
            "Install a newer torch",
            hurts=False,
        )
    if torch and ipex and _minor(ipex) != _minor(torch):
        yield Finding(
            "ipex-torch",
            f"IPEX {ipex} and torch {torch} are installed",
            f"IPEX {_minor(ipex)} works with torch {_minor(ipex)} alone, and its import fails with another",
            f'Uninstall IPEX, or install its torch (pip install "torch=={_minor(ipex)}.*")',
        )
    for name in ("lightning", "pytorch-lightning"):
        if (version := inspected.packages.get(name)) in ("2.6.2", "2.6.3"):
            yield Finding(
                "malicious-lightning",
                f"{name} {version} is installed",
                "attackers published this release (GHSA-w37p-236h-pfx3), and it runs their code",
                "Uninstall it, and change the credentials that this machine has",
            )


def requirements(inspected: Inspected) -> Iterator[Finding]:
    """Find a package whose metadata asks for another version of one of the others."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
    except ImportError:  # it comes with Lightning
        return
    for name, text in ((name, text) for name, texts in inspected.requirements.items() for text in texts):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        version = inspected.packages.get(canonicalize_name(requirement.name))
        is_for_an_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if version is None or is_for_an_extra or requirement.specifier.contains(version, prereleases=True):
            continue
        yield Finding(
            "requirement",
            f"{name} needs {requirement.name}{requirement.specifier}, and {version} is installed",
            "packages fail in unexpected places with versions that they were not made for",
            f'Run: pip install "{requirement.name}{requirement.specifier}"',
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
            f"the affinity mask of this process excludes CPUs {format_cpu_list(left_out)}",
            at_most,
            "Start without taskset or numactl, or ask the scheduler for more CPUs (Slurm: --cpus-per-task)",
            hurts=False,
        )
    if left_out := online - could:
        yield Finding(
            "cpuset",
            f"the cpuset of this container excludes CPUs {format_cpu_list(left_out)}",
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


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
