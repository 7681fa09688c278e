"""What the C functions that need the bf16 instructions of AVX-512 have in common.

Each library ``NAME`` has ``NAME_is_supported``, which is 0 where the compiler's target has no such instructions, and
``NAME_bytes``, the memory that a call takes.
"""

from __future__ import annotations

import ctypes
import functools

from nano_loop.kernels.compiled import UnavailableError, compiled_for_threads


@functools.cache
def unavailable(library: str) -> str | None:
    """Return why a library cannot be used in this process, or None."""
    try:
        supported = getattr(compiled_for_threads(library), f"{library}_is_supported")()
    except UnavailableError as error:
        return str(error)
    return None if supported else "the CPU has no bf16 instructions of AVX-512"


def is_first_guess(library: str) -> bool:
    """Whether its products are faster than oneDNN's on most shapes: not on CPUs with AMX, which oneDNN uses."""
    return unavailable(library) is None and bool(getattr(compiled_for_threads(library), f"{library}_is_first_guess")())


def needed_bytes(library: str, call: ctypes.Structure, argument: int) -> int:
    """Return how many bytes of memory a call takes, by the function ``NAME_bytes``."""
    function = getattr(compiled_for_threads(library), f"{library}_bytes")
    function.restype = ctypes.c_int64
    return int(function(ctypes.byref(call), argument))
