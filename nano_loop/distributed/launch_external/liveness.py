"""How ranks of one host see that another's process has ended, where nano_loop has not started it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.abandoned import has_ended
from nano_loop.distributed.launch.failure import died
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel

_INTERVAL = 0.2  # seconds between two looks at the others


@contextmanager
def watching_each_other(ranks: Ranks, processes: Sequence[int]) -> Iterator[None]:
    """Let every wait of the ranks of one host see that another's process has ended without leaving the run.

    Parameters
    ----------
    ranks : Ranks
        Who they are. Their ``check`` raises a `NanoWorkerError` then.
    processes : sequence of int
        The numbers of their processes, by rank.
    """
    launcher_s, looked = ranks.check, time.monotonic()

    def check() -> None:
        nonlocal looked
        launcher_s()
        if time.monotonic() < looked + _INTERVAL:
            return
        looked = time.monotonic()
        for rank, process in enumerate(processes):
            # It may have left, and ended, since we looked at its process.
            if has_ended(process) and not _has_left(ranks, rank):
                raise died(rank).as_error()

    ranks.check = check
    try:
        yield
    finally:
        ranks.check = launcher_s


def _has_left(ranks: Ranks, rank: int) -> bool:
    channel = ranks.channel if ranks.have_joined else None
    return isinstance(channel, SharedChannel) and channel.segment.has_left(rank)
