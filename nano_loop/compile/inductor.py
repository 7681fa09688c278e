"""Arguments of `torch.compile`: Inductor keeps our operators, draws as plain loops do, and starts sooner."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from nano_loop.compile.graphs import keeping
from nano_loop.errors import NanoError
from nano_loop.patching.torch_private_compiler import mode_options
from nano_loop.storage.cache_folder import cache_folder, inductor_folder
from nano_loop.storage.trusted_files import open_folder

#: What Inductor may pass to the C++ compiler on a CPU of x86-64, depending on the CPU.
_FLAGS = ("-mavx2", "-mfma", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx512vnni")
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_PATIENCE = 10.0  # timeout of the compiler, in seconds


def with_operators(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return arguments of `torch.compile` with which Inductor keeps the operators of these names whole.

    It also draws random numbers as the plain loop does. The user's options prevail. Another backend than Inductor gets
    the arguments as they are.
    """
    arguments = dict(options)
    if arguments.get("backend") not in (None, "inductor"):
        return arguments
    # torch takes a mode or options.
    modes = mode_options(arguments.pop("mode", None), arguments.get("dynamic"))
    ours: dict[str, Any] = {"pre_grad_custom_pass": keeping(names)} if names else {}
    # Random numbers come from torch's generator, in order. Inductor's own would be seeded from it, which leaves it in
    # another state than the plain loop does: the next shuffle of a loader would differ.
    ours["fallback_random"] = True
    if _compiler_has_vectors():
        ours["cpp.vec_isa_ok"] = True
    arguments["options"] = {**ours, **modes, **(arguments.get("options") or {})}
    return arguments


@contextmanager
def own_cache() -> Iterator[None]:
    """Let Inductor keep what it compiles below nano_loop's cache folder, unless the user has named a folder.

    Its default belongs to whoever has made it first: it lies in the folder for temporary files, by the user's name.
    """
    before, folder = os.environ.get(_CACHE), cache_folder()
    with suppress(OSError, NanoError):
        if folder is not None and before in (None, inductor_folder()):
            os.close(open_folder(folder))
            os.environ[_CACHE] = str(folder / "torchinductor")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE, None)
        else:
            os.environ[_CACHE] = before


@functools.cache
def _compiler_has_vectors() -> bool:
    """Whether the C++ compiler knows the vector instructions of all CPUs of x86-64.

    Otherwise Inductor has to find out which ones it knows, by libraries that take several seconds to compile.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    command = [*(shlex.split(os.environ.get("CXX", "")) or ["g++"]), *_FLAGS, "-E", "-x", "c++", os.devnull]
    try:
        run = subprocess.run(command, capture_output=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return not run.returncode
