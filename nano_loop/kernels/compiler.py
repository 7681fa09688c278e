"""The C compiler, and the instruction set levels that the files in ``csrc`` are compiled for.

It imports neither torch nor other nano_loop modules, because ``setup.py`` loads it by path to build wheels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "csrc"
#: The libraries that were compiled when the package was built or installed.
PREBUILT = Path(__file__).parent / "prebuilt"
#: The library that reports which OpenMP runtime the others call. A level is in the package if this library is.
OPENMP = "openmp"
#: The values of ``NANO_LOOP_KERNELS`` that are not levels.
OFF, COMPILE = "off", "compile"

# gcc comes first: its OpenMP directives call GNU's functions, which every runtime has.
_COMPILERS = ("gcc", "cc", "clang")
# No function reads floating-point exception flags or errno. To preserve them, gcc would not vectorize comparisons and
# square roots.
_FLAGS = ("-O3", "-fPIC", "-fno-trapping-math", "-fno-math-errno")
# Used to compile the directives, but not to link: a second OpenMP runtime would start more threads in addition to
# torch's. The functions that the directives call are found in the runtime that torch has loaded: see `share_openmp`.
_PARALLEL = ("-fopenmp",)
_DIRECTIVE = b"omp parallel"
_NATIVE = {"x86_64": "-march=native", "AMD64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
# The fields read from an ELF file: kind, machine, offsets of segments and sections, number of segments, size and number
# of sections; and for a segment, its offset and size.
_HEADER, _SEGMENT = struct.Struct("<6s12xH12xQQ8xHHH2x"), struct.Struct("<8xQ16xQ16x")
_ELF, _ELF_MACHINES = b"\x7fELF\2\1", {"x86_64": 62, "aarch64": 183}
_SECONDS = 60.0  # time limit of the compiler per file during a run
# Follow-up messages that a compiler prints after the actual error.
_CONSEQUENCES = ("compilation terminated", "ld returned", "warning:", "note:")


class UnavailableError(Exception):
    """A compiled kernel is not available. The reason is one line, for the report.

    `output` is the full output of the compiler. It is empty if the compiler has not run.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


class Level(NamedTuple):
    """An instruction set level that libraries are compiled for."""

    name: str  # a value of ``NANO_LOOP_KERNELS``
    flags: tuple[str, ...]
    #: The required CPU features, by Linux's names. A CPU with these has the rest of the level.
    instruction_sets: frozenset[str]
    machine: str = "x86_64"  # by Linux's names


_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
#: From best to worst for each machine.
LEVELS = (
    Level("bf16", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    Level("v4", ("-march=x86-64-v4",), _V4),
    Level("v3", ("-march=x86-64-v3",), _V3),
    Level("sve", ("-march=armv8.2-a+sve+bf16",), frozenset(("asimd", "sve", "bf16")), "aarch64"),
    Level("neon", ("-march=armv8-a",), frozenset(("asimd",)), "aarch64"),
)
#: All instructions of this CPU.
NATIVE = Level(COMPILE, tuple(filter(None, [_NATIVE.get(platform.machine())])), frozenset())


def chosen_level(choice: str | None, instruction_sets: Collection[str]) -> Level:
    """Return the instruction set level of a process.

    `choice` is the value of ``NANO_LOOP_KERNELS``. None means the best level that the CPU supports if packaged,
    otherwise `NATIVE`. `instruction_sets` are the features of the CPU, by Linux's names.

    Raises an `UnavailableError` if the choice is `OFF`, or a level that the CPU does not support.
    """
    if choice == OFF:
        raise UnavailableError("NANO_LOOP_KERNELS=off")
    if choice is None:
        supported = (level for level in LEVELS if level.instruction_sets.issubset(instruction_sets))
        return next((level for level in supported if packaged(library_name(OPENMP, level)).exists()), NATIVE)
    level = next((level for level in LEVELS if level.name == choice), NATIVE)
    missing = level.instruction_sets.difference(instruction_sets)
    if missing:
        raise UnavailableError(f"the CPU has no {', '.join(sorted(missing))}, which NANO_LOOP_KERNELS={choice} needs")
    return level


def library_name(name: str, level: Level) -> str:
    """Return the file name of the library compiled from ``<name>.c`` for a level.

    It contains a hash of the source, the headers and the flags, and for `NATIVE` also of the processor.
    """
    headers = [header.read_bytes() for header in sorted(SOURCES.glob("*.h"))]
    processor = [platform.machine(), platform.system(), _processor()] if level is NATIVE else []
    texts = [
        (SOURCES / f"{name}.c").read_bytes(),
        *headers,
        *map(str.encode, [*_FLAGS, *_PARALLEL, *level.flags, *processor]),
    ]
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()
    return f"{name}-{level.name}-{digest[:16]}.so"


@functools.cache
def sources_digest() -> str:
    """Return a hash of all C files: measurements of other versions do not apply."""
    texts = [file.read_bytes() for file in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def packaged(file: str) -> Path:
    """Return the path of a library in the package, whether or not it exists."""
    return PREBUILT / file


def damage_of(library: Path) -> str | None:
    """Return the reason why a library of the package must not be loaded, or None.

    Loading a truncated library crashes the process, because the loader maps the segments in its headers.
    """
    try:
        with library.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            header = opened.read(_HEADER.size).ljust(_HEADER.size, b"\0")
            kind, machine, segments, sections, count, of_section, number = _HEADER.unpack(header)
            if kind != _ELF or machine != _ELF_MACHINES.get(platform.machine()):
                return f"{library.name} is not a library for {platform.machine()}"
            opened.seek(segments)
            table = opened.read(count * _SEGMENT.size).ljust(count * _SEGMENT.size, b"\xff")
    except OSError as error:
        return f"{library.name} cannot be read ({error})"
    end = max(sections + of_section * number, *(sum(segment) for segment in _SEGMENT.iter_unpack(table)), _HEADER.size)
    return f"{library.name} is truncated at byte {size:,}" if end > size else None


def compiler_command() -> list[str]:
    """Return the command of the C compiler: ``CC``, or the first one that is installed.

    Raises an `UnavailableError` if there is no compiler.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    raise UnavailableError(f"no C compiler was found ({named[0] if named else ', '.join(_COMPILERS)})")


def compile_library(name: str, level: Level, library: Path, seconds: float = _SECONDS) -> None:
    """Compile ``<name>.c`` into a library. The compiler's temporary files are in the library's folder.

    Raises an `UnavailableError` if there is no compiler, or it fails.
    """
    command, source, compiled = compiler_command(), SOURCES / f"{name}.c", library.with_suffix(".o")
    parallel = _PARALLEL if _DIRECTIVE in source.read_bytes() else ()
    translate = [*command, *_FLAGS, *parallel, "-c", "-o", str(compiled), str(source)]
    try:
        _run([*translate, *level.flags], library.parent, seconds)
    except UnavailableError:
        if level is not NATIVE or not level.flags:
            raise
        _run(translate, library.parent, seconds)  # an old compiler does not know this CPU
    _run([*command, "-shared", "-o", str(library), str(compiled), "-lm"], library.parent, seconds)


class _Place(ctypes.Structure):
    """`Dl_info` of ``dladdr``."""

    _fields_ = (("file", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in ("base", "symbol", "address")))


def share_openmp(library: str) -> None:
    """Let libraries that are loaded from now on use the OpenMP runtime of a library that is already loaded.

    torch's x86-64 wheels export theirs, but its ARM wheels do not. It is found through a function that the library
    calls, because a process may have several runtimes, with hashes in their names. No second one is loaded.
    """
    with suppress(AttributeError, OSError):  # none found: loading a library that needs it fails
        place, function = _Place(), ctypes.CDLL(library, os.RTLD_NOLOAD).omp_get_max_threads
        if ctypes.CDLL(None).dladdr(function, ctypes.byref(place)):
            ctypes.CDLL(os.fsdecode(place.file), os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)


def cause_of(output: str) -> str:
    """Return the line of a compiler's output that names the error, as the last lines may be consequences."""
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not any(words in line for words in _CONSEQUENCES)]
    return next((line for line in lines if "error:" in line), lines[0] if lines else "no message")


def _run(command: Sequence[str], folder: Path, seconds: float) -> None:
    environ = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, env=environ
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]} took longer than {seconds:g} s") from error
    if run.returncode:
        raise UnavailableError(f"{command[0]} failed: {cause_of(run.stderr)}", run.stderr)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
