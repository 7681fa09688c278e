"""Asks the C library to keep freed memory, so that a training step does not fault its pages in again.

By default glibc gives every large block back to the kernel when it is freed, and gets it again, page by page, in the
next step. With these three settings a small CNN went from about 8,500 to 200 page faults a step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nano_loop.parts import Parts
from nano_loop.steps.step import Step

# From malloc.h: the parameters' numbers, what is set, and the default that mallopt(3) documents.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: -1, _TOP_PAD: 1 << 26}  # -1: never trim
_DEFAULTS = {_MMAP_THRESHOLD: 128 * 1024, _TRIM_THRESHOLD: 128 * 1024, _TOP_PAD: 128 * 1024}
_runs: list[object] = []
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_USERS_OWN = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


class Allocator(Step):
    """Sets glibc's thresholds with `mallopt(3)`.

    Undoing puts glibc's documented defaults back and trims the heap. Its own adjustment of the thresholds stays off,
    for glibc has no way to turn that on again.
    """

    name = "allocator"
    needs = None
    once = True

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        if not _is_glibc():
            return "the C library is not glibc"
        other = _other_allocator()
        if other:
            return f"{other} is loaded in glibc's place"
        for variable in _USERS_OWN:
            if variable in os.environ:
                return f"{variable} is set, and stays in force"
        return None

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        self.undoing.enter_context(_kept_memory())
        return "glibc keeps freed memory"


def _is_glibc() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):  # musl does not know the name
        return False


def _other_allocator(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Name the allocator that is loaded instead of glibc's, from the libraries mapped into this process."""
    try:
        libraries = {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if ".so" in line}
    except OSError:
        return None
    return next((name for name in _OTHER_ALLOCATORS if any(name in library for library in libraries)), None)


def _set(values: dict[int, int]) -> None:
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in values.items():
        mallopt(parameter, value)


@contextmanager
def _kept_memory() -> Iterator[None]:
    """Hold the settings until the last run that asked for them has ended: a run inside a run ends first."""
    _runs.append(object())
    _set(_SETTINGS)
    try:
        yield
    finally:
        _runs.pop()
        if not _runs:
            _set(_DEFAULTS)
            ctypes.CDLL(None).malloc_trim(0)
