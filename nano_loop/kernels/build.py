"""C kernels: the files in ``csrc``, as libraries in the package, or compiled on first use and cached.

A wheel has libraries for several instruction set levels (see `nano_loop.kernels.compiler`), and the best one that this
CPU supports is used. Neither installing nor importing nano_loop requires a compiler: missing libraries are compiled on
first use, and a kernel that cannot be compiled is not used. These libraries are stored in the user's cache folder (see
`nano_loop.storage.cache_folder`). ``NANO_LOOP_KERNELS`` overrides the choice; a process reads it once.
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

_LARGEST = 1 << 26  # maximum size of a library in bytes
_DIGEST = hashlib.sha256().digest_size  # size of the hash appended to a library, which the loader ignores
_NONE = "there are no C kernels"
_numbers = itertools.count()

#: Maximum number of bytes that a call may use for packing and partial sums, in all threads together.
SCRATCH_BOUND = 256 * 2**20

#: An argument of a C function: a tensor for a pointer to its elements, None for NULL, int for int64_t, float for
#: double, a structure for a pointer to it, or bytes for a pointer to a copy of them.
Argument = Tensor | ctypes.Structure | bytes | int | float | None


class CompiledKernel:
    """The functions of a C file, with the information needed to call them.

    `name` is that of the file, without its suffix. `functions` have their tensor parameters in order; other arguments
    are numbers and structures. If they use torch's threads, they accept their number as last argument and release the
    GIL. A file that `needs_avx512_bf16`, the bf16 instructions of AVX-512, includes ``avx512_bf16.h`` and defines
    ``NAME_bytes``, which returns the memory that a call needs.
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
        #: The number of calls so far.
        self.calls = 0

    @functools.cached_property
    def unavailable(self) -> str | None:
        """The reason why the functions cannot be used in this process, or None."""
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
        """Whether they have an AMX implementation, the CPU supports it, and the system lets this process use it."""
        return self.unavailable is None and hasattr(self._library(), "has_amx") and bool(self._library().has_amx())

    def __call__(self, function: str, *arguments: Argument) -> int:
        """Call a function and return its result, if any; raise an `UnsupportedTensorError` before it computes."""
        tensors = [argument for argument in arguments if argument is None or isinstance(argument, Tensor)]
        check(tensors, self.functions[function])
        threads = (ctypes.c_int(torch.get_num_threads()),) if self._is_threaded else ()
        self.calls += 1
        return int(getattr(self._library(), function)(*map(_as_c, arguments), *threads))

    def bytes_of(self, call: ctypes.Structure, argument: int) -> int:
        """Return the number of bytes that a call needs, by the function ``NAME_bytes``."""
        function = getattr(self._library(), f"{self.name}_bytes")
        function.restype = ctypes.c_int64
        return int(function(ctypes.byref(call), ctypes.c_int(argument)))

    def _library(self) -> ctypes.CDLL:
        return compiled(self.name, self._is_threaded)


def scratch(size: int) -> Tensor:
    """Allocate memory for a call."""
    return empty(size, dtype=torch.uint8)


def _as_c(argument: Argument) -> object:
    if argument is None:
        return None
    # First, because an optimizer passes many numbers with each tensor.
    if isinstance(argument, (int, float)):
        return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_double(argument)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.create_string_buffer(argument, len(argument))


@functools.cache
def level() -> Level:
    """Return the instruction set level of this process; raise an `UnavailableError` if the user disables kernels."""
    return chosen_level(kernels_choice(os.environ), read_machine().instruction_sets)


@functools.cache
def why_none() -> str | None:
    """Return the reason why no kernel can use torch's threads in this process, or None. Shown in a report's title."""
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
    return "they would run on a different OpenMP runtime than torch"


def summary() -> str:
    """Return which kernels this process uses, for the title of a report."""
    reason = why_none()
    if reason is not None:
        return f"no C kernels: {reason}"
    return "C kernels compiled here" if level() is NATIVE else f"C kernels {level().name}"


def for_report(reason: str) -> str:
    """Return why a kernel is unavailable, without the part that the report's title already shows."""
    return _NONE if reason == why_none() else reason


@functools.cache
def compiled(name: str, is_threaded: bool = True) -> ctypes.CDLL:
    """Return the library compiled from ``<name>.c``; raise an `UnavailableError` if this fails or it is damaged.

    If it uses torch's threads (`is_threaded`), its functions release the GIL. Other functions take microseconds and
    hold it.
    """
    file = library_name(name, level())
    reason = why_none() if is_threaded else None
    if reason is not None:
        raise UnavailableError(reason)
    try:
        if packaged(file).exists():
            damage = damage_of(packaged(file))
            if damage is not None:
                raise UnavailableError(f"{damage}: reinstall nano_loop")
            return _opened(str(packaged(file)), is_threaded)
        return _cached(name, file, is_threaded)
    except (OSError, NanoError) as error:
        if "__kmpc_" in str(error):
            raise UnavailableError("clang's OpenMP is not torch's: install gcc") from error
        raise UnavailableError(f"the compiled kernel could not be written or loaded ({error})") from error


def _cached(name: str, file: str, is_threaded: bool) -> ctypes.CDLL:
    """Return a library from the cache folder, compiling it if it is missing."""
    kept = cache_folder()
    if kept is not None:
        with suppress(OSError, NanoError):  # missing, damaged, or writable for another user
            return _loaded(file, kept, is_threaded)
    compiler_command()  # raise early if there is none
    _announce_compilation()
    parent = trusted_parent((kept, Path(tempfile.gettempdir())))
    with tempfile.TemporaryDirectory(prefix="making-", dir=parent) as making:
        library = Path(making, file)
        compile_library(name, level(), library)
        content = library.read_bytes()
        content += _digest(content)
        with suppress(OSError, NanoError):  # the cache folder is full, read-only, or mounted noexec
            return _kept(file, kept or library.parent, content, is_threaded)
        return _kept(file, library.parent, content, is_threaded)


def compilation_announced(listener: Callable[[str], object]) -> AbstractContextManager[None]:
    """Let a function receive a message when the process starts to compile kernels, which takes seconds."""
    return listening(compilation_announced, listener)


@functools.cache  # once per process
def _announce_compilation() -> None:
    for listener in (value_in_force(compilation_announced) or [])[-1:]:
        listener("nano_loop: compiling C kernels for this CPU, which takes some seconds; later runs reuse them")


def _kept(file: str, folder: Path, content: bytes, is_threaded: bool) -> ctypes.CDLL:
    """Write a library and load it."""
    with opened_folder(folder) as descriptor:
        write_file(file, descriptor, content)
    return _loaded(file, folder, is_threaded)


def _loaded(file: str, folder: Path, is_threaded: bool) -> ctypes.CDLL:
    """Check the hash of a library, then load it: loading a truncated one would crash the process."""
    with opened_folder(folder) as above, open(open_file(file, above), "rb") as opened:
        content = opened.read(_LARGEST)
        if content[-_DIGEST:] != _digest(content[:-_DIGEST]):
            raise OSError(f"{file} is damaged")
        # The loader caches libraries by path, so each one needs its own path.
        path = path_of(opened.fileno(), folder / file)
        return _opened(os.path.join(path.parent, "./" * next(_numbers), path.name), is_threaded)


def _opened(path: str, is_threaded: bool) -> ctypes.CDLL:
    return ctypes.CDLL(path) if is_threaded else ctypes.PyDLL(path)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
