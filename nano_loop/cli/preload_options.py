"""The options by which `env` and `run` preload libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

_T = TypeVar("_T")


def preload_options(function: Callable[..., _T]) -> Callable[..., _T]:
    """Add the options to a command, which takes their names as ``preload``."""

    @click.option("--intel-openmp", is_flag=True, help="Preload Intel's OpenMP, if it is found.")
    @click.option("--tcmalloc", "--enable-tcmalloc", "-t", is_flag=True, help="Preload tcmalloc, if it is found.")
    @click.option("--jemalloc", "--enable-jemalloc", "-j", is_flag=True, help="Preload jemalloc, if it is found.")
    @functools.wraps(function)
    def command(jemalloc: bool, tcmalloc: bool, intel_openmp: bool, **others: Any) -> _T:
        if jemalloc and tcmalloc:
            both = "--jemalloc with --tcmalloc: a process has one allocator"
            raise click.UsageError(both, click.get_current_context())
        options = {"intel-openmp": intel_openmp, "jemalloc": jemalloc, "tcmalloc": tcmalloc}
        return function(preload=tuple(name for name, wanted in options.items() if wanted), **others)

    return command
