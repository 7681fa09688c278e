"""CPU ids as people and the kernel write them: ``0-3,8``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# The most that Linux can be built for. A damaged file that says "0-99999999999" must not eat all memory.
HIGHEST_CPU_ID = 8191

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read a list of CPU ids.

    Parameters
    ----------
    text : str
        Ids and ranges, divided by commas, as in the kernel's ``cpulist`` files. Blank means no CPU.

    Returns
    -------
    tuple of int
        The ids, sorted, each once.

    Raises
    ------
    ValueError
        If `text` is anything else, or has an id above `HIGHEST_CPU_ID`.
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
    """Write CPU ids in their short form, ``(0, 1, 2, 3, 8)`` as ``"0-3,8"``.

    Parameters
    ----------
    cpus : iterable of int
        The ids, in any order; duplicates count once.

    Returns
    -------
    str
        What `parse_cpu_list` reads back; empty for no CPU.
    """
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
    """Yield the first and the last id of every unbroken run."""
    start = 0
    for end, cpu in enumerate(cpus, start=1):
        if end == len(cpus) or cpus[end] != cpu + 1:
            yield cpus[start], cpu
            start = end
