"""Compiles the C files of this folder at first use, with the machine's compiler, and caches the result.

Neither installing nor importing nano_loop needs a compiler: a kernel that cannot be compiled is not used. Compiled
libraries are stored in the user's cache folder (see `nano_loop.cache_folder`). The file name contains a hash of the
source, the headers, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nano_loop.cache_folder import cache_folder

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-fPIC")
# The directives are compiled with it, and linked without: a second OpenMP runtime would have threads of its own beside
# torch's. The functions that the directives call are found in the runtime that torch has loaded for all libraries.
_PARALLEL = ("-fopenmp",)
_NATIVE = {"x86_64": "-march=native", "AMD64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
_PATIENCE = 60.0  # timeout of the compiler, in seconds


_Library = TypeVar("_Library", bound=ctypes.CDLL)


class UnavailableError(Exception):
    """A compiled kernel is not available. The message is the reason for the report."""


@functools.cache
def compiled(name: str) -> ctypes.PyDLL:
    """Return the library compiled from ``<name>.c``, whose functions take microseconds. They hold the GIL.

    Raises
    ------
    UnavailableError
        If no compiler is found, or the compiler fails.
    """
    return _loaded(name, ctypes.PyDLL, ())


@functools.cache
def compiled_for_threads(name: str) -> ctypes.CDLL:
    """Return the library compiled from ``<name>.c`` with OpenMP, for torch's threads. Its functions release the GIL.

    Raises
    ------
    UnavailableError
        If no compiler is found, the compiler fails, or torch's OpenMP runtime is not that of the compiler.
    """
    return _loaded(name, ctypes.CDLL, _PARALLEL)


def _loaded(name: str, load: Callable[[str], _Library], flags: tuple[str, ...]) -> _Library:
    source = Path(__file__).with_name(f"{name}.c")
    command = _compiler()
    folder = cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="nano_loop-") as temporary:
            # Once loaded, it may be deleted.
            return _made(command, flags, source, Path(temporary) / f"{name}.so", load)
    library = folder / f"{name}-{_key([*command, *flags], source)}.so"
    try:
        return load(str(library))
    except OSError:  # missing or damaged
        return _made(command, flags, source, library, load)


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CC", ""))
    for command in [given] if given else [[name] for name in _COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise UnavailableError(f"no C compiler was found ({given[0] if given else ', '.join(_COMPILERS)})")


def _made(
    command: list[str], flags: tuple[str, ...], source: Path, library: Path, load: Callable[[str], _Library]
) -> _Library:
    """Compile into a temporary folder and move the library into place atomically, for concurrent processes."""
    try:
        with tempfile.TemporaryDirectory(prefix="making-", dir=library.parent) as folder:
            made, compiled = Path(folder) / library.name, Path(folder) / f"{source.stem}.o"
            translate = [*command, *_FLAGS, *flags, "-c", "-o", str(compiled), str(source)]
            native = _NATIVE.get(platform.machine())
            if not (native and _compiles([*translate, native])):
                _compiles(translate, must=True)
            _compiles([*command, "-shared", "-o", str(made), str(compiled), "-lm"], must=True)
            made.replace(library)
        return load(str(library))
    except OSError as error:
        raise UnavailableError(f"the compiled kernel could not be written or loaded ({error})") from error


def _compiles(command: list[str], must: bool = False) -> bool:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]} took longer than {_PATIENCE:g} s") from error
    if run.returncode and must:
        said = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"{command[0]} failed: {said}")
    return not run.returncode


def _key(command: list[str], source: Path) -> str:
    """Return the cache key of a compiled library: a hash of the source, the compiler and the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        processor = platform.processor()
    headers = [each.read_text() for each in sorted(source.parent.glob("*.h"))]
    parts = [source.read_text(), *headers, *command, *_FLAGS, platform.machine(), platform.system(), processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
