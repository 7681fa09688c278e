"""Takes items in groups of one for each rank, so that every rank gets as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def shares(take: Callable[[int], list[Any]], rank: int, size: int) -> Iterator[Any]:
    """Yield every `size`-th item, from the `rank`-th on, and as many of them on every rank.

    The last group is filled up from the first items. A group is taken whole before its item is yielded, so what the
    loop tells a sampler in between counts for the same items on every rank.

    Parameters
    ----------
    take : callable
        Returns the next items, as many as it is told, or fewer at the end.
    rank, size : int
        Whose items, and of how many.
    """
    first: list[Any] | None = None
    while group := take(size):
        if first is None:
            first = group[:rank]  # the most that this rank can lack
        item = group[rank] if rank < len(group) else first[(rank - len(group)) % len(first)]
        last = len(group) < size
        del group  # the items may be batches, of which no more are kept than needed
        yield item
        if last:
            return
