"""CPU lists in the kernel's format: ``0-3,8``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

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
