"""The boundary that the kernel draws: compiled code cannot change the caller's files behind it.

Linux has it since 5.13, by the name of Landlock. It holds for the thread that draws it and all that it starts, to their
ends.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from typing import Any

from nano_loop.distributed.files.original_os import original_os

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the numbers of the calls, the same for all processors
_VERSION, _BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38  # of prctl
# What is kept to the folders: to write a file, to remove, make and link one. A folder that compiled code makes is real.
_WRITE, _REMOVE, _MAKE, _LINK = 1 << 1, 1 << 5, 1 << 8, 1 << 12
_MOVE, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3


def keep_writes_in(folders: Iterable[str]) -> bool:
    """Refuse to this thread, and to what it starts, to change files outside of folders.

    Returns
    -------
    bool
        Whether the kernel does so.
    """
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
    except OSError:  # it is not there
        return
    call(_ADD, rules, _BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    os.close(descriptor)
