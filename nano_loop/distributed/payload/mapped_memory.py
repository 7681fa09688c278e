"""Memory of this process that other processes can map too: shared mappings of files, of memory or of a disk."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nano_loop.errors import NanoError, error_message

_ROW_PARTS = 6  # of /proc/self/maps: addresses, permissions, offset, device, inode, path


@dataclass(frozen=True)
class Mapped:
    """A range of a file that another process of this user can open, as long as this one has it mapped.

    Parameters
    ----------
    path : str
        The file's; of one without a name, that of a descriptor of this process.
    start, size : int
        The range, in bytes.
    device, inode : int
        Which file it is.
    """

    path: str
    start: int
    size: int
    device: int
    inode: int

    def load(self) -> torch.Tensor:
        """Map the range, for this process alone where it writes; a NanoError if the file is not there any more."""
        size = self.start + self.size
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise NanoError(self._lost(str(error))) from error
        if (status.st_dev, status.st_ino) != (self.device, self.inode) or status.st_size < size:
            raise NanoError(self._lost("it is another file, or shorter"))
        return torch.from_file(self.path, shared=False, size=size, dtype=torch.uint8, device="cpu")[self.start :]

    def _lost(self, why: str) -> str:
        got = f"an argument has its memory in {self.path}, which this process cannot map ({why})"
        hint = "Keep the file as it is until the run has started, or pass a copy (tensor.clone(), array.copy())"
        return error_message(got, "memory that is shared with a file is mapped, not copied", hint)


def mapped(address: int, size: int) -> Mapped | None:
    """Return the file behind a range of this process's memory; None if it is not shared with a file's.

    Pages of a private mapping may have been written to, and are then this process's alone.
    """
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/maps") as rows:
        for row in rows:
            parts = row.split(maxsplit=_ROW_PARTS - 1)
            first, last = (int(end, 16) for end in parts[0].split("-"))
            if first <= address and address + size <= last:
                return _file(parts, address - first, size) if parts[1].endswith("s") else None
    return None


def _file(parts: list[str], offset: int, size: int) -> Mapped | None:
    device = os.makedev(*(int(part, 16) for part in parts[3].split(":")))
    inode = int(parts[4])
    name = parts[5].rstrip("\n") if len(parts) == _ROW_PARTS else ""
    for path in [name, *_descriptors()]:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if status.st_ino == inode and (status.st_dev == device or path != name):
            return Mapped(path, int(parts[2], 16) + offset, size, status.st_dev, inode)
    return None


def _descriptors() -> list[str]:
    """Return the paths by which other processes open this one's files; one that is open may have no other name."""
    folder = Path(f"/proc/{os.getpid()}/fd")
    return [str(folder / name) for name in os.listdir(folder)]
