"""Faults: files of earlier processes, or files named by options, are damaged or not regular files."""

import contextlib
import os
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
from kernels.conftest import forget_libraries

from faults.fault import Fault
from faults.runs import environ, train
from nano_loop import nano
from nano_loop.data.images import lifetime, store
from nano_loop.data.images.store import ImageEntry
from nano_loop.kernels import build

_IMAGE = ImageEntry(np.zeros((10, 10, 3), np.uint8), "{}")
_KEY = "00" + "0" * 38


@contextlib.contextmanager
def _folder():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _library(damage):
    """Train with a damaged kernel in the cache."""

    def commit():
        with _folder() as folder, environ(XDG_CACHE_HOME=str(folder), NANO_LOOP_KERNELS="compile"):
            forget_libraries()
            build.compiled("bernoulli", False)
            (library,) = (folder / "nano_loop").glob("bernoulli-*")
            content = library.read_bytes()
            library.unlink()
            damage(library, content)
            forget_libraries()
            train()
            build.compiled("bernoulli", False)
            assert library.read_bytes() == content
            forget_libraries()

    return commit


def _entry(damage):
    """Read and write a damaged folder for images."""

    def commit():
        with _folder() as folder:
            store = lifetime.store_for([], str(folder))
            store.put(_KEY, _IMAGE)
            damage(folder / _KEY[:2] / _KEY[2:])
            assert store.get(_KEY) is None
            store.put(_KEY, _IMAGE)
            assert store.get(_KEY) is not None

    return commit


def _claim_more(entry):
    content = bytearray(entry.read_bytes())
    struct.pack_into("<II", content, store._SUM.size + len(_KEY), 90_000, 90_000)
    head = content[store._SUM.size :]
    entry.write_bytes(store._SUM.pack(store._MAGIC, zlib.crc32(head)) + head)


def _damage_count(entry):
    (entry.parents[1] / "used").write_bytes(b"\xff" * 16)
    entry.unlink()


def _names(path):
    return lambda: nano(num_processes=2, precision="bf16", bf16_ops=path)(lambda model: None)


FAULTS = [
    *(
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
    ),
    *(
        Fault(f"in a folder for images {what}", _entry(damage))
        for what, damage in (
            ("an entry claims more pixels than it has bytes", _claim_more),
            ("an entry takes more than the memory", lambda entry: os.truncate(entry, 1 << 40)),
            ("the count of bytes is damaged", _damage_count),
        )
    ),
    *(Fault(f"a list of operators is in {path}", _names(path)) for path in ("/dev/full", "/dev/urandom")),
]
