"""The environment in which this machine trains best. `env` exports it, and `run` starts scripts in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nano_loop.cli.at_start import search_path
from nano_loop.config.environment import EXPORTS, Exports, read_exports
from nano_loop.config.protocol import INSTALL
from nano_loop.cpu import Machine
from nano_loop.cpu.glibc import SETTINGS_AS_VARIABLES, USERS_OWN, allocators_of, is_glibc
from nano_loop.errors import NanoConfigError, error_message

#: Libraries to preload, by the name of the option: the names of the library, and the package that provides it.
PRELOADS = {
    "jemalloc": (("libjemalloc",), "Debian: libjemalloc2, conda: jemalloc"),
    "tcmalloc": (("libtcmalloc", "libtcmalloc_minimal"), "Debian: libtcmalloc-minimal4, conda: gperftools"),
    "intel-openmp": (("libiomp5",), "pip install intel-openmp"),
}
# From torch's tuning guide: freed memory is kept.
_MALLOC_CONF = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
)
# Milliseconds that Intel's threads spin after a parallel region. The default of 200 blocks other work.
_BLOCKTIME = "1"


@dataclass
class TrainingEnvironment:
    """The variables to set."""

    values: dict[str, str] = field(default_factory=dict)  # the value of each variable
    kept: list[str] = field(default_factory=list)  # the variables that the user has set and that are kept

    def set(self, name: str, value: str, environ: Mapping[str, str]) -> None:
        """Set a variable, unless the user has set it."""
        if name not in environ:
            self.values[name] = value
        elif environ[name] != value:
            self.kept.append(name)


def training_environment(
    machine: Machine,
    environ: Mapping[str, str],
    preload: tuple[str, ...] = (),
    root: Path | str = "/",
    *,
    installs: bool = False,
) -> TrainingEnvironment:
    """Return the variables for training on a machine; those set before, in `environ`, are kept.

    `preload` are names in `PRELOADS`. Raises a `NanoConfigError` if a library is not found, or another allocator is
    preloaded.
    """
    made = TrainingEnvironment()
    made.set("OMP_NUM_THREADS", str(machine.num_threads), environ)
    libraries = [_library(name, environ, root) for name in preload]
    present = preloaded(environ)
    _refuse_two_allocators([*libraries, *present], environ)
    if new := [library for library in libraries if library not in present]:
        others = environ.get("LD_PRELOAD", "")
        made.values["LD_PRELOAD"] = ":".join([*new, *([others] if others.strip(": ") else [])])
    if "jemalloc" in preload:
        made.set("MALLOC_CONF", _MALLOC_CONF, environ)
    if "intel-openmp" in preload:
        made.set("KMP_BLOCKTIME", _BLOCKTIME, environ)
    if not allocators_of([*libraries, *present]) and is_glibc():
        _set_glibc(made, environ)
    if installs:
        made.set(INSTALL, "1", environ)
        made.values["PYTHONPATH"] = search_path(environ)
    return made


def exported(environ: Mapping[str, str], made: TrainingEnvironment) -> dict[str, str]:
    """Return an environment with these variables, and with the one that stores the previous values."""
    before: dict[str, str | None] = {name: environ.get(name) for name in made.values}
    return {**environ, **made.values, EXPORTS: Exports(before, made.values).encoded()}


def before_exports(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as it was before `exported`; raise a `NanoConfigError` if what it stored is damaged."""
    before = {name: value for name, value in environ.items() if name != EXPORTS}
    for name, value in read_exports(environ).before.items():
        if value is None:
            before.pop(name, None)
        else:
            before[name] = value
    return before


def changes_between(now: Mapping[str, str], then: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables to set, or to unset (None), to turn one environment into another."""
    names = sorted({name for name in {*now, *then} if now.get(name) != then.get(name)})
    return {name: then.get(name) for name in names}


def _set_glibc(made: TrainingEnvironment, environ: Mapping[str, str]) -> None:
    users = [name for name in USERS_OWN if name in environ]
    if users and any(environ.get(name) != value for name, value in SETTINGS_AS_VARIABLES.items()):
        made.kept += users
        return
    for name, value in SETTINGS_AS_VARIABLES.items():
        made.set(name, value, environ)


def _library(name: str, environ: Mapping[str, str], root: Path | str) -> str:
    stems, package = PRELOADS[name]
    if not sys.platform.startswith("linux"):
        raise NanoConfigError(error_message(f"--{name}", "libraries can be preloaded only on Linux", "Omit it"))
    for stem in stems:
        if path := find_library(stem, environ, sys.prefix, root):
            return path
    hint = f"Install it ({package}), or omit --{name}"
    raise NanoConfigError(error_message(f"--{name}", f"{stems[0]}.so was not found", hint))


def _refuse_two_allocators(libraries: list[str], environ: Mapping[str, str]) -> None:
    allocators = allocators_of(libraries)
    if len(allocators) > 1:
        got = f"{' and '.join(allocators)} (LD_PRELOAD={environ.get('LD_PRELOAD', '')})"
        raise NanoConfigError(error_message(got, "a process can use only one allocator", "Remove one of them"))


def preloaded(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the entries of ``LD_PRELOAD``, which are separated by colons or spaces."""
    return tuple(filter(None, re.split(r"[: \t\n]+", environ.get("LD_PRELOAD", ""))))


def find_library(stem: str, environ: Mapping[str, str], prefix: str, root: Path | str = "/") -> str | None:
    """Return the absolute path of a library such as ``libjemalloc``, or None.

    The search begins in `prefix`, the folder of this Python's environment, since pip and conda install libraries there.
    Relative folders are omitted: they resolve differently from another working folder.
    """
    tops = ("usr/local/lib", "usr/lib64", "usr/lib", "lib64", "lib")
    folders = [Path(prefix, "lib")]
    folders += [Path(environ["CONDA_PREFIX"], "lib")] if environ.get("CONDA_PREFIX") else []
    folders += map(Path, filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")))
    folders += [path for top in tops for path in (Path(root, top), *sorted(Path(root, top).glob("*-linux-gnu*")))]
    for folder in filter(Path.is_absolute, folders):
        # LD_PRELOAD does not support paths with spaces. The shortest name links to the newest version.
        matching = [path for path in folder.glob(f"{stem}.so*") if re.fullmatch(r"[^: \t\n]+\.so(\.\d+)*", str(path))]
        if existing := [str(path) for path in matching if path.exists()]:
            return min(existing, key=lambda path: (len(path), path))
    return None
