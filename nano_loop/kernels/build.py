"""Kernels in C: the files in ``csrc``, compiled at first use with the machine's compiler, and cached.

Neither installing nor importing nano_loop needs a compiler: a kernel that cannot be compiled is not used. Compiled
libraries are stored in the user's cache folder (see `nano_loop.storage.cache_folder`). The file name contains a hash
of the source, the headers, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from nano_loop.errors import NanoError
from nano_loop.kernels.memory import Pointer, check, empty
from nano_loop.storage.cache_folder import cache_folder
from nano_loop.storage.trusted_files import open_file, opened_folder, path_of, trusted_parent, write_file

_SOURCES = Path(__file__).parent / "csrc"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-fPIC")
# The directives are compiled with it, and linked without: a second OpenMP runtime would start more threads beside
# torch's. The functions that the directives call are found in the runtime that torch has loaded for all libraries.
_PARALLEL = ("-fopenmp",)
_NATIVE = {"x86_64": "-march=native", "AMD64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
_PATIENCE = 60.0  # timeout of the compiler, in seconds
_LARGEST = 1 << 26  # bytes of a library
_DIGEST = hashlib.sha256().digest_size  # bytes of the hash at a library's end, which the loader does not look at
_numbers = itertools.count()


class UnavailableError(Exception):
    """A compiled kernel is not available. The message is the reason for the report."""


#: Maximum number of bytes that a call takes for what it packs and sums up, in all threads together.
SCRATCH_BOUND = 256 * 2**20

#: What a C function takes: a tensor for a pointer to its elements, None for NULL, int for int64_t, float for double.
Argument = Tensor | ctypes.Structure | int | float | None


class CompiledKernel:
    """The functions of a C file, and what each kernel has to know of them.

    Parameters
    ----------
    name : str
        The name of the file, without its ending.
    functions : mapping of str to tuple of Pointer
        The functions, and what each takes for tensors, in their order. Other arguments are numbers and structures.
    is_threaded : bool
        Whether the functions use torch's threads, whose number is then their last argument, and release the GIL.
    needs_avx512_bf16 : bool
        Whether they need the bf16 instructions of AVX-512. The file then includes ``avx512_bf16.h``, and has
        ``NAME_bytes``, the memory that a call takes.
    """

    def __init__(
        self,
        name: str,
        functions: Mapping[str, tuple[Pointer, ...]],
        *,
        is_threaded: bool = True,
        needs_avx512_bf16: bool = False,
    ) -> None:
        self.name = name
        self.functions = functions
        self._is_threaded = is_threaded
        self._needs_avx512_bf16 = needs_avx512_bf16
        #: How often the functions have been called.
        self.calls = 0

    @functools.cached_property
    def unavailable(self) -> str | None:
        """Why the functions cannot be used in this process, or None."""
        try:
            library = self._library()
        except UnavailableError as error:
            return str(error)
        supported = not self._needs_avx512_bf16 or library.is_supported()
        return None if supported else "the CPU has no bf16 instructions of AVX-512"

    @functools.cached_property
    def is_first_guess(self) -> bool:
        """Whether they are faster than oneDNN on most shapes: most are not on CPUs with AMX, which oneDNN uses."""
        return self.unavailable is None and bool(self._library().is_first_guess())

    def __call__(self, function: str, *arguments: Argument) -> int:
        """Call a function, and return its result, if it has one.

        Raises
        ------
        UnsupportedTensorError
            If the function does not take a tensor. Nothing was computed then.
        """
        tensors = [argument for argument in arguments if argument is None or isinstance(argument, Tensor)]
        check(tensors, self.functions[function])
        threads = (ctypes.c_int(torch.get_num_threads()),) if self._is_threaded else ()
        self.calls += 1
        return int(getattr(self._library(), function)(*map(_as_c, arguments), *threads))

    def bytes_of(self, call: ctypes.Structure, argument: int) -> int:
        """Return how many bytes of memory a call takes, by the function ``NAME_bytes``."""
        function = getattr(self._library(), f"{self.name}_bytes")
        function.restype = ctypes.c_int64
        return int(function(ctypes.byref(call), ctypes.c_int(argument)))

    def _library(self) -> ctypes.CDLL:
        return compiled(self.name, self._is_threaded)


def scratch(size: int) -> Tensor:
    """Return memory for a call."""
    return empty(size, dtype=torch.uint8)


def _as_c(argument: Argument) -> object:
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


@functools.cache
def compiled(name: str, is_threaded: bool = True) -> ctypes.CDLL:
    """Return the library compiled from ``<name>.c``.

    Parameters
    ----------
    name : str
        The name of the file, without its ending.
    is_threaded : bool
        Whether it is compiled with OpenMP, for torch's threads. Its functions release the GIL then. Those of others
        take microseconds, and hold it.

    Raises
    ------
    UnavailableError
        If no compiler is found, the compiler fails, or torch's OpenMP runtime is not that of the compiler.
    """
    flags = _PARALLEL if is_threaded else ()
    source, command = _SOURCES / f"{name}.c", _compiler()
    file = f"{name}-{_key([*command, *flags], source)}.so"
    kept = cache_folder()
    if kept is not None:
        with suppress(OSError, NanoError):  # it is missing or damaged, or another user could change it
            return _loaded(file, kept, is_threaded)
    try:
        parent = trusted_parent((kept, Path(tempfile.gettempdir())))
        with tempfile.TemporaryDirectory(prefix="making-", dir=parent) as making:
            library = _made(command, flags, source, Path(making, file))
            content = library.read_bytes()
            content += _digest(content)
            with suppress(OSError, NanoError):  # the cache folder is full or closed, or programs in it cannot run
                return _kept(file, kept or library.parent, content, is_threaded)
            return _kept(file, library.parent, content, is_threaded)
    except (OSError, NanoError) as error:
        raise UnavailableError(f"the compiled kernel could not be written or loaded ({error})") from error


def _kept(file: str, folder: Path, content: bytes, is_threaded: bool) -> ctypes.CDLL:
    """Write a library, and load it."""
    with opened_folder(folder) as descriptor:
        write_file(file, descriptor, content)
    return _loaded(file, folder, is_threaded)


def _loaded(file: str, folder: Path, is_threaded: bool) -> ctypes.CDLL:
    """Load a library, once its hash is that of what was written: a part that is missing would end the process."""
    with opened_folder(folder) as above, open(open_file(file, above), "rb") as opened:
        content = opened.read(_LARGEST)
        if content[-_DIGEST:] != _digest(content[:-_DIGEST]):
            raise OSError(f"{file} is damaged")
        # The loader takes a library for one that it has loaded by the same path, so each has its own.
        path = path_of(opened.fileno(), folder / file)
        name = os.path.join(path.parent, "./" * next(_numbers), path.name)
        return ctypes.CDLL(name) if is_threaded else ctypes.PyDLL(name)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    raise UnavailableError(f"no C compiler was found ({named[0] if named else ', '.join(_COMPILERS)})")


def _made(command: list[str], flags: tuple[str, ...], source: Path, library: Path) -> Path:
    """Compile a library in a folder of its own, where the compiler has its temporary files, too."""
    compiled = library.with_suffix(".o")
    translate = [*command, *_FLAGS, *flags, "-c", "-o", str(compiled), str(source)]
    native = _NATIVE.get(platform.machine())
    if not (native and _compiles([*translate, native], library.parent)):
        _compiles(translate, library.parent, must=True)
    _compiles([*command, "-shared", "-o", str(library), str(compiled), "-lm"], library.parent, must=True)
    return library


def _compiles(command: list[str], folder: Path, must: bool = False) -> bool:
    environ = {**os.environ, "TMPDIR": str(folder)}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False, env=environ)
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
    headers = [header.read_text() for header in sorted(source.parent.glob("*.h"))]
    parts = [source.read_text(), *headers, *command, *_FLAGS, platform.machine(), platform.system(), processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
