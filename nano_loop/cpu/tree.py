"""Fault-tolerant access to /proc and /sys below a root folder, and their CPU lists: ``0-3,8``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

# The maximum that Linux supports. The limit protects against damaged files, such as "0-99999999999".
HIGHEST_CPU_ID = 8191

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the ids in a list such as ``0-3,8``, sorted and without duplicates; empty if `text` is invalid."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last <= HIGHEST_CPU_ID:
            return ()
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format CPU ids, in any order, as a list of ranges: ``(0, 1, 2, 3, 8)`` as ``"0-3,8"``; empty without CPUs."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in _runs(sorted(set(cpus))))


def _runs(cpus: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last id of each range of consecutive ids."""
    start = 0
    for end, cpu in enumerate(cpus, start=1):
        if end == len(cpus) or cpus[end] != cpu + 1:
            yield cpus[start], cpu
            start = end


# The length is limited, so that a damaged file cannot cause an overflow.
_NUMBER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def parse_number(text: str | None) -> int | None:
    """Return the integer in `text`, or None if it is not an integer."""
    stripped = (text or "").strip()
    return int(stripped) if _NUMBER.fullmatch(stripped) else None


class Tree:
    """The files below a root folder with ``proc`` and ``sys``. Missing, unreadable or damaged files read as empty.

    Sandboxes may hide any of them, and training must still start: no method raises, and callers need no error handling.
    """

    def __init__(self, root: Path | str) -> None:
        self._root = str(root)
        self._texts: dict[str, str] = {}  # cached, since several functions read the same files

    def text(self, path: str) -> str:
        """Return the content of the file at `path` when it was first read, or an empty string."""
        if path not in self._texts:
            self._texts[path] = self._read(path)
        return self._texts[path]

    def _read(self, path: str) -> str:
        relative = path.lstrip("/")
        # Paths may come from files (/proc/self/cgroup may contain "/.."), and must not leave the root.
        if ".." in relative.split("/"):
            return ""
        try:
            with open(os.path.join(self._root, relative), encoding="utf-8", errors="replace") as file:
                return file.read()
        except (OSError, ValueError):  # ValueError: a null byte in the path
            return ""

    def number(self, path: str) -> int | None:
        """Return the integer in the file at `path`, or None."""
        return parse_number(self.text(path))

    def sizes(self, path: str) -> dict[str, int]:
        """Return the bytes in the lines ``NAME:   123 kB`` of the file at `path`, by name."""
        lines = re.findall(r"^(\w+):\s+(\d{1,15}) kB$", self.text(path), re.MULTILINE)
        return {name: int(count) << 10 for name, count in lines}

    def cpu_list(self, path: str) -> tuple[int, ...]:
        """Return the CPU ids in the file at `path`, or an empty tuple."""
        return parse_cpu_list(self.text(path))

    def numbered_folders(self, path: str, prefix: str) -> list[int]:
        """Return the sorted numbers N of the entries ``<prefix>N`` in the folder `path`."""
        try:
            names = os.listdir(os.path.join(self._root, path.lstrip("/")))
        except (OSError, ValueError):
            return []
        numbers = [parse_number(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
        return sorted(number for number in numbers if number is not None)
