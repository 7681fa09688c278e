"""Kernels in C: the files in ``csrc``, in libraries of the package, or compiled at first use and cached.

A wheel has libraries for several levels of instructions (see `nano_loop.kernels.compiler`), and the best that this CPU
has is used. Neither installing nor importing nano_loop needs a compiler: what the package does not have is compiled at
first use, and a kernel that cannot be compiled is not used. Libraries that were compiled then are stored in the user's
cache folder (see `nano_loop.storage.cache_folder`). ``NANO_LOOP_KERNELS`` chooses otherwise; a process reads it once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
from torch import Tensor

from nano_loop.config.environment import kernels_choice
from nano_loop.cpu import read_machine
from nano_loop.errors import NanoError
from nano_loop.kernels.compiler import (
    LEVELS,
    NATIVE,
    OPENMP,
    Level,
    UnavailableError,
    chosen_level,
    compile_library,
    compiler_command,
    damage_of,
    library_name,
    packaged,
    share_openmp,
)
from nano_loop.kernels.memory import Pointer, check, empty
from nano_loop.patching.patch_table import listening, value_in_force
from nano_loop.patching.torch_private import python_library
from nano_loop.storage.cache_folder import cache_folder
from nano_loop.storage.trusted_files import open_file, opened_folder, path_of, trusted_parent, write_file

_LARGEST = 1 << 26  # bytes of a library
_DIGEST = hashlib.sha256().digest_size  # bytes of the hash at a library's end, which the loader does not look at
_AMX = frozenset(("amx_bf16", "amx_tile"))
_NONE = "there are no C kernels"
_numbers = itertools.count()

#: Maximum number of bytes that a call takes for what it packs and sums up, in all threads together.
SCRATCH_BOUND = 256 * 2**20

#: What a C function takes: a tensor for a pointer to its elements, None for NULL, int for int64_t, float for double; a
#: structure for a pointer to it, or bytes for one to a copy of them.
Argument = Tensor | ctypes.Structure | bytes | int | float | None


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
        if not self._needs_avx512_bf16 or library.is_supported():
            return None
        is_of_cpu = LEVELS[0].instruction_sets.issubset(read_machine().instruction_sets)
        return f"{'the C kernels here have' if is_of_cpu else 'the CPU has'} no bf16 instructions of AVX-512"

    @functools.cached_property
    def uses_amx(self) -> bool:
        """Whether they have a way by AMX, the CPU has it, and the system lets this process use it."""
        return self.unavailable is None and hasattr(self._library(), "has_amx") and bool(self._library().has_amx())

    @functools.cached_property
    def is_first_guess(self) -> bool:
        """Whether they are faster than oneDNN on most shapes: most are not on CPUs with AMX, which oneDNN uses."""
        return self.unavailable is None and not _AMX.issubset(read_machine().instruction_sets)

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
    if isinstance(argument, bytes):
        return ctypes.create_string_buffer(argument, len(argument))
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


@functools.cache
def level() -> Level:
    """Return the level of this process.

    Raises
    ------
    UnavailableError
        If it has no kernels by ``NANO_LOOP_KERNELS``.
    """
    return chosen_level(kernels_choice(os.environ), read_machine().instruction_sets)


@functools.cache
def why_none() -> str | None:
    """Return why no kernel can use torch's threads in this process, or None. The title of a report says it."""
    share_openmp(python_library())
    try:
        library = compiled(OPENMP, is_threaded=False)
    except UnavailableError as error:
        return str(error)
    threads = torch.get_num_threads()
    if library.max_threads() == threads:
        library.set_threads(threads + 1)
        is_torchs = torch.get_num_threads() == threads + 1
        library.set_threads(threads)
        if is_torchs:
            return None
    return "they would run on another OpenMP runtime than torch"


def summary() -> str:
    """Return which kernels this process has, for the title of a report."""
    reason = why_none()
    if reason is not None:
        return f"no C kernels: {reason}"
    return "C kernels compiled here" if level() is NATIVE else f"C kernels {level().name}"


def for_report(reason: str) -> str:
    """Return why a kernel is not available, without what the title of the report says."""
    return _NONE if reason == why_none() else reason


@functools.cache
def compiled(name: str, is_threaded: bool = True) -> ctypes.CDLL:
    """Return the library compiled from ``<name>.c``.

    Parameters
    ----------
    name : str
        The name of the file, without its ending.
    is_threaded : bool
        Whether it uses torch's threads. Its functions release the GIL then. Those of others take microseconds, and
        hold it.

    Raises
    ------
    UnavailableError
        If no compiler is found, the compiler fails, the package's library is damaged, or torch's OpenMP runtime is not
        that of the library.
    """
    file = library_name(name, level())
    reason = why_none() if is_threaded else None
    if reason is not None:
        raise UnavailableError(reason)
    try:
        if packaged(file).exists():
            damage = damage_of(packaged(file))
            if damage is not None:
                raise UnavailableError(f"{damage}: install nano_loop again")
            return _opened(str(packaged(file)), is_threaded)
        return _cached(name, file, is_threaded)
    except (OSError, NanoError) as error:
        if "__kmpc_" in str(error):
            raise UnavailableError("clang's OpenMP is not torch's: install gcc") from error
        raise UnavailableError(f"the compiled kernel could not be written or loaded ({error})") from error


def _cached(name: str, file: str, is_threaded: bool) -> ctypes.CDLL:
    """Return a library of the cache folder, which is compiled where it is missing."""
    kept = cache_folder()
    if kept is not None:
        with suppress(OSError, NanoError):  # it is missing or damaged, or another user could change it
            return _loaded(file, kept, is_threaded)
    compiler_command()  # if there is none, nothing takes long
    _announce_compilation()
    parent = trusted_parent((kept, Path(tempfile.gettempdir())))
    with tempfile.TemporaryDirectory(prefix="making-", dir=parent) as making:
        library = Path(making, file)
        compile_library(name, level(), library)
        content = library.read_bytes()
        content += _digest(content)
        with suppress(OSError, NanoError):  # the cache folder is full or closed, or programs in it cannot run
            return _kept(file, kept or library.parent, content, is_threaded)
        return _kept(file, library.parent, content, is_threaded)


def compilation_announced(listener: Callable[[str], object]) -> AbstractContextManager[None]:
    """Let a function take a line when the process begins to compile kernels, which takes seconds."""
    return listening(compilation_announced, listener)


@functools.cache  # once in a process
def _announce_compilation() -> None:
    for listener in (value_in_force(compilation_announced) or [])[-1:]:
        listener("nano_loop: compiling kernels in C for this CPU, which takes some seconds and is kept for later runs")


def _kept(file: str, folder: Path, content: bytes, is_threaded: bool) -> ctypes.CDLL:
    """Write a library, and load it."""
    with opened_folder(folder) as descriptor:
        write_file(file, descriptor, content)
    return _loaded(file, folder, is_threaded)


def _loaded(file: str, folder: Path, is_threaded: bool) -> ctypes.CDLL:
    """Check the hash of a library, then load it: a truncated one would end the process."""
    with opened_folder(folder) as above, open(open_file(file, above), "rb") as opened:
        content = opened.read(_LARGEST)
        if content[-_DIGEST:] != _digest(content[:-_DIGEST]):
            raise OSError(f"{file} is damaged")
        # The loader takes a library for one that it has loaded by the same path, so each has its own.
        path = path_of(opened.fileno(), folder / file)
        return _opened(os.path.join(path.parent, "./" * next(_numbers), path.name), is_threaded)


def _opened(path: str, is_threaded: bool) -> ctypes.CDLL:
    return ctypes.CDLL(path) if is_threaded else ctypes.PyDLL(path)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
