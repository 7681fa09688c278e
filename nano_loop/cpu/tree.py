"""A view of /proc and /sys below one root folder, for which no file is too odd to read."""

from __future__ import annotations

import re
from pathlib import Path

from nano_loop.cpu.cpu_list import parse_cpu_list

# Bounded, so that a damaged file cannot make a number that overflows later on.
_NUMBER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def parse_number(text: str | None) -> int | None:
    """Read a whole number, or None where `text` is not one."""
    stripped = (text or "").strip()
    return int(stripped) if _NUMBER.fullmatch(stripped) else None


class Tree:
    """The files below a root folder; what is missing, unreadable or damaged reads as nothing.

    Containers, sandboxes and virtual machines hide or garble any part of /proc and /sys, and a training run
    must start all the same. So no method of this class raises, and callers need no error handling.

    Parameters
    ----------
    root : str or pathlib.Path
        The folder that holds ``proc`` and ``sys``: ``/`` on a live machine.
    """

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root)

    def text(self, path: str) -> str:
        """Return what the file at `path` holds, or an empty string."""
        relative = path.lstrip("/")
        # Paths come from files as well (/proc/self/cgroup may say "/.."): none may lead out of the root.
        if ".." in relative.split("/"):
            return ""
        try:
            return (self._root / relative).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):  # ValueError: a null byte in the path
            return ""

    def number(self, path: str) -> int | None:
        """Return the whole number that the file at `path` holds, or None."""
        return parse_number(self.text(path))

    def cpu_list(self, path: str) -> tuple[int, ...]:
        """Return the CPU ids that the file at `path` lists, or none."""
        try:
            return parse_cpu_list(self.text(path))
        except ValueError:
            return ()

    def numbered_folders(self, path: str, prefix: str) -> list[int]:
        """Return the sorted numbers N of the entries ``<prefix>N`` in the folder `path`."""
        try:
            names = [entry.name for entry in (self._root / path.lstrip("/")).iterdir()]
        except (OSError, ValueError):
            return []
        numbers = [parse_number(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
        return sorted(number for number in numbers if number is not None)
