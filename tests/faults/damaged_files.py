"""Faults: compiled kernels of earlier processes are damaged or not regular files."""

import os
import tempfile
from pathlib import Path

from kernels.conftest import forget_libraries

from faults.fault import Fault
from faults.runs import environ, train
from nano_loop.kernels import build


def _library(damage):
    def commit():
        with tempfile.TemporaryDirectory() as folder, environ(XDG_CACHE_HOME=folder, NANO_LOOP_KERNELS="compile"):
            forget_libraries()
            build.compiled("bernoulli", False)
            (library,) = Path(folder, "nano_loop").glob("bernoulli-*")
            content = library.read_bytes()
            library.unlink()
            damage(library, content)
            forget_libraries()
            train()
            build.compiled("bernoulli", False)
            assert library.read_bytes() == content
            forget_libraries()

    return commit


FAULTS = [
    Fault(f"a compiled kernel in the cache {what}", _library(damage))
    for what, damage in (
        ("is truncated", lambda library, content: library.write_bytes(content[:4096])),
        (
            "has lost its last blocks",
            lambda library, content: library.write_bytes(content[:8192].ljust(len(content))),
        ),
        ("is a pipe", lambda library, content: os.mkfifo(library)),
        ("is a link to an endless file", lambda library, content: library.symlink_to("/dev/full")),
    )
]
