"""The rank of this process for Lightning's libraries, which print messages only on rank 0."""

from __future__ import annotations

from contextlib import suppress

# A dependency of lightning-fabric. Fabric's own module of this name reads the rank from here, but imports Fabric.
from lightning_utilities.core.rank_zero import rank_zero_only


def note_rank(rank: int | None) -> int | None:
    """Set the rank of this process for Lightning's messages, and return the previous one. None means not set."""
    before: int | None = getattr(rank_zero_only, "rank", None)
    if rank is None:
        with suppress(AttributeError):
            del rank_zero_only.rank  # type: ignore[attr-defined]
    else:
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
    return before
