"""Findings about the kernels in C, and the folder in which those that are compiled are kept."""

from __future__ import annotations

from collections.abc import Iterator

from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import Inspected
from nano_loop.config.environment import KERNELS
from nano_loop.kernels.compiler import COMPILE, OFF

_LOST = "steps in bf16 take 9 to 58% longer without them (GPT-2 31%, ViT-S 9%, an LSTM 15%, on a Zen 4)"


def no_kernels(inspected: Inspected) -> Iterator[Finding]:
    """Find neither libraries in the package nor a compiler that works."""
    kernels, choice = inspected.kernels, inspected.environ.get(KERNELS)
    if kernels is None or kernels.level is not None:
        return
    if choice == OFF:
        yield Finding(
            "kernels-off", f"{KERNELS}=off turns the kernels in C off", _LOST, f"Unset {KERNELS}", hurts=False
        )
        return
    yield Finding(
        "no-kernels",
        f"there are no kernels in C: {kernels.reason}",
        _LOST,
        f"Unset {KERNELS}"
        if choice
        else "Install gcc (Debian and Ubuntu: apt install gcc libc6-dev), or a wheel that has them",
    )


def kernels_are_damaged(inspected: Inspected) -> Iterator[Finding]:
    """Find libraries of the package that were not written to their end."""
    if inspected.kernels is not None and inspected.kernels.level is not None and inspected.kernels.reason:
        advice = "Install nano_loop again: pip install --force-reinstall --no-deps nano_loop"
        yield Finding("damaged-kernels", f"the package is damaged: {inspected.kernels.reason}", _LOST, advice)


def cache_is_closed(inspected: Inspected) -> Iterator[Finding]:
    """Find a cache folder that this user cannot write to, or alone, or that has no place."""
    cache = inspected.cache
    if cache is None or cache.is_writable:
        return
    compiles = inspected.kernels is not None and inspected.kernels.level == COMPILE
    yield Finding(
        "cache-folder",
        f"{cache.path} cannot be written by this user alone" if cache.path else "this user has no home folder",
        f"each run measures operators anew{', and compiles the kernels in C, which takes seconds' * compiles}",
        "Make it writable for this user alone (chmod 700), or set XDG_CACHE_HOME to a folder that is"
        if cache.path
        else "Set XDG_CACHE_HOME to a folder that this user alone can write to",
        hurts=compiles,
    )


def cache_is_not_executable(inspected: Inspected) -> Iterator[Finding]:
    """Find kernels that would be compiled into a file system from which no library is loaded."""
    cache, kernels = inspected.cache, inspected.kernels
    if cache is not None and not cache.is_executable and kernels is not None and kernels.level == COMPILE:
        yield Finding(
            "cache-noexec",
            f"{cache.path} is on a file system that is mounted noexec",
            f"kernels that are compiled there cannot be loaded: {_LOST}",
            "Set XDG_CACHE_HOME to a folder elsewhere, or install a wheel that has the kernels",
        )


FINDINGS = (no_kernels, kernels_are_damaged, cache_is_closed, cache_is_not_executable)
