"""Kernel-enforced isolation: compiled code cannot bypass it to change the caller's files.

Linux has this since 5.13, as Landlock. It applies to the thread that enables it and everything that it starts, until
they end.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from typing import Any

from nano_loop.distributed.files.original_os import original_os

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system call numbers, the same on all architectures
_VERSION, _BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38  # for prctl
# The restricted operations: write, remove, create and link files. Folders that compiled code creates are real.
_WRITE, _REMOVE, _MAKE, _LINK = 1 << 1, 1 << 5, 1 << 8, 1 << 12
_MOVE, _TRUNCATE = 1 << 13, 1 << 14  # since ABI versions 2 and 3


def keep_writes_in(folders: Iterable[str]) -> bool:
    """Forbid this thread and what it starts to change files outside of folders; return whether the kernel can."""
    if sys.platform != "linux":
        return False
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    version = call(_CREATE, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    rights = _WRITE | _REMOVE | _MAKE | _LINK | _MOVE * (version >= 2) | _TRUNCATE * (version >= 3)
    handled = struct.pack("=Q", rights)
    rules = call(_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return False
    try:
        for folder in folders:
            _allow(call, rules, folder, rights)
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(call(_RESTRICT, rules, 0) == 0)
    finally:
        os.close(rules)


def _allow(call: Any, rules: int, folder: str, rights: int) -> None:
    try:
        descriptor = original_os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # the folder does not exist
        return
    call(_ADD, rules, _BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    os.close(descriptor)
