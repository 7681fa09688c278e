"""CPU lists in the kernel's format: ``0-3,8``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# The maximum that Linux supports. The limit protects against damaged files, such as "0-99999999999".
HIGHEST_CPU_ID = 8191

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the ids in a list such as ``0-3,8``, sorted, without duplicates. Blank means no CPU.

    Raises
    ------
    ValueError
        If `text` has another format, or an id above `HIGHEST_CPU_ID`.
    """
    if not text.strip():
        return ()
    try:
        return tuple(sorted({cpu for part in text.split(",") for cpu in _parse_part(part.strip())}))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a list of CPU ids. It takes ids from 0 to {HIGHEST_CPU_ID} and ranges of them. "
            "Write it like '0-3,8'."
        ) from None


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format CPU ids, in any order, as a list of ranges: ``(0, 1, 2, 3, 8)`` as ``"0-3,8"``; empty for no CPU."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in _runs(sorted(set(cpus))))


def _parse_part(part: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(part)
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last <= HIGHEST_CPU_ID:
        raise ValueError(part)
    return range(first, last + 1)


def _runs(cpus: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last id of each range of consecutive ids."""
    start = 0
    for end, cpu in enumerate(cpus, start=1):
        if end == len(cpus) or cpus[end] != cpu + 1:
            yield cpus[start], cpu
            start = end
