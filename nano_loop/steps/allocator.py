"""Makes the C library keep freed memory, so that a training step does not fault its pages in again.

Forked processes do not keep it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from typing_extensions import override

from nano_loop.cpu.glibc import (
    MMAP_THRESHOLD,
    SETTINGS,
    TOP_PAD,
    TRIM_THRESHOLD,
    USERS_OWN,
    allocator_of_this_process,
    is_glibc,
    keeps_freed_memory,
)
from nano_loop.patching.patch_table import shared_change, users
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SkipReason, Step

# The settings after a run. By default, glibc raises its thresholds dynamically as large blocks are freed. The first
# call of mallopt disables this. These values are the highest that glibc would reach (DEFAULT_MMAP_THRESHOLD_MAX, and
# twice that), so no block size becomes slower. With the documented defaults of 128 KiB, loops over tensors of 4 to
# 31 MB were 2 to 5 times as slow after a run as before it.
_LEFT = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20, TOP_PAD: 128 << 10}

# The settings of the first steps. Otherwise, long-lived memory allocated there, such as optimizer state, would lie
# between the blocks that each step frees, and fragment the heap: the peak of an LSTM's training was 1.24 times plain
# torch's, and is 1.04. So large blocks are mapped separately.
_FIRST = SETTINGS | {MMAP_THRESHOLD: 1 << 20}


class Allocator(Step):
    """Sets glibc's thresholds with `mallopt(3)`, after the first step of each optimizer, when its state exists.

    Undoing sets the highest thresholds that glibc would choose, and trims the heap: nothing enables its adjustment
    again.
    """

    name = "allocator"
    needs = None
    once = True

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if not is_glibc():
            return SkipReason("not_glibc", "the C library is not glibc")
        other = allocator_of_this_process()
        if other:
            return SkipReason("other_allocator", f"{other} is loaded instead of glibc's")
        if keeps_freed_memory(os.environ):
            return None
        for variable in USERS_OWN:
            if variable in os.environ:
                return SkipReason("users_setting", f"{variable} is set, and is kept")
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self.undoing.enter_context(shared_change(_trimmed_children, _trimmed_children))
        if keeps_freed_memory(os.environ):
            return "glibc keeps freed memory, as set by its environment variables"
        self.undoing.enter_context(shared_change(_kept_memory, _kept_memory))
        if parts.optimizers:
            _set(_FIRST)
            self.undoing.callback(self.clock.in_steps(len(parts.optimizers), partial(_set, SETTINGS)))
        return "glibc keeps freed memory"


def give_back() -> None:
    """Map large blocks separately from now on, as in the first steps: a limit leaves no room for kept memory."""
    if users(_kept_memory):
        _set(_FIRST)


def _set(values: dict[int, int]) -> None:
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in values.items():
        mallopt(parameter, value)


def trim() -> None:
    """Return freed memory to the kernel, including from the middle of the heap."""
    if is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _kept_memory() -> Iterator[None]:
    _set(SETTINGS)
    try:
        yield
    finally:
        _set(_LEFT)
        trim()


@contextmanager
def _trimmed_children() -> Iterator[None]:
    """Let processes that are forked in this context, as a loader's workers, return freed memory that they inherit.

    Otherwise the kernel copies each page that is written to next: a ResNet-18's first step took half a second longer.
    """
    trim = _trim_after_fork()
    trim.is_on = True
    try:
        yield
    finally:
        trim.is_on = False


@functools.cache
def _trim_after_fork() -> SimpleNamespace:
    """Return a switch. While it is on, each process that this one forks returns freed memory."""
    switch = SimpleNamespace(is_on=False)
    # Python cannot unregister it.
    os.register_at_fork(after_in_child=lambda: trim() if switch.is_on else None)
    return switch
