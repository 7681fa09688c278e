"""The kernels in C that a run would have, found out without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nano_loop.config.environment import kernels_choice
from nano_loop.errors import NanoConfigError
from nano_loop.kernels.compiler import (
    OPENMP,
    SOURCES,
    Level,
    UnavailableError,
    chosen_level,
    compile_library,
    compiler_command,
    damage_of,
    library_name,
    packaged,
)
from nano_loop.storage.cache_folder import cache_path


class Kernels(NamedTuple):
    """Which kernels in C a run would have."""

    level: str | None  # None: none
    origin: str = ""  # where they are from
    reason: str = ""  # why there are none, or not all
    output: str = ""  # all that a compiler which failed has printed


def inspect_kernels(environ: Mapping[str, str], instruction_sets: Collection[str]) -> Kernels | None:
    """Return the kernels of a CPU with these instruction sets; None if ``NANO_LOOP_KERNELS`` has no allowed value.

    Where the package has none, the compiler compiles a short file, which is thrown away.
    """
    try:
        level = chosen_level(kernels_choice(environ), instruction_sets)
        file, cache = library_name(OPENMP, level), cache_path()
        if packaged(file).exists():
            return Kernels(level.name, "in the package", "; ".join(_damages(level)))
        if cache is not None and (cache / file).exists():
            return Kernels(level.name, "in the cache folder")
        with tempfile.TemporaryDirectory() as making:
            compile_library(OPENMP, level, Path(making, file))
        return Kernels(level.name, f"compiled at first use, by {compiler_command()[0]}")
    except UnavailableError as error:
        return Kernels(None, reason=str(error), output=error.output)
    except NanoConfigError:
        return None


def _damages(level: Level) -> Iterator[str]:
    """Yield what is wrong with libraries of the package, which a run does not load."""
    for source in sorted(SOURCES.glob("*.c")):
        library = packaged(library_name(source.stem, level))
        if library.exists() and (damage := damage_of(library)) is not None:
            yield damage
