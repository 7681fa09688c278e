"""The settings that make glibc keep freed memory, for `mallopt(3)` and as environment variables.

By default, glibc returns every large block to the kernel when it is freed, and the next training step faults it in
again, page by page. With these three settings, a small CNN went from about 8,500 to 200 page faults per step.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

# From malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
#: The value of each parameter of mallopt. Larger blocks, such as the gradient of a large vocabulary's layer, are mapped
#: separately: in the heap, they leave gaps that no other such block fits into.
SETTINGS = {MMAP_THRESHOLD: 1 << 29, TRIM_THRESHOLD: -1, TOP_PAD: 1 << 26}  # -1: never trim
#: The environment variable of each parameter.
VARIABLES = {
    MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_",
    TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_",
    TOP_PAD: "MALLOC_TOP_PAD_",
}
#: The values of environment variables that have the effect of `SETTINGS`.
SETTINGS_AS_VARIABLES = {VARIABLES[parameter]: str(value) for parameter, value in SETTINGS.items()}
#: Variables with which a user sets these parameters.
USERS_OWN = ("GLIBC_TUNABLES", *VARIABLES.values())
ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def is_glibc() -> bool:
    """Whether the C library of this process is glibc."""
    return platform.libc_ver()[0] == "glibc"


def keeps_freed_memory(environ: Mapping[str, str]) -> bool:
    """Whether glibc was started with these settings."""
    return all(environ.get(name) == value for name, value in SETTINGS_AS_VARIABLES.items())


@functools.cache
def allocator_of_this_process() -> str | None:
    """Return the allocator that replaces glibc's, among the libraries mapped now: a later one does not replace it."""
    try:
        return next(iter(allocators_of(libraries_in(Path("/proc/self/maps").read_text()))), None)
    except OSError:
        return None


def libraries_in(maps: str) -> tuple[str, ...]:
    """Return the paths of the shared libraries in the text of ``/proc/<pid>/maps``, sorted."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if ".so" in line}
    return tuple(sorted(path for path in paths if path.startswith("/")))


def allocators_of(libraries: Iterable[str]) -> tuple[str, ...]:
    """Return the allocators among libraries, sorted."""
    files = [Path(library).name for library in libraries]
    return tuple(name for name in sorted(ALLOCATORS) if any(name in file for file in files))
