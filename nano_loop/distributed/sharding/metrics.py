"""Keeps torchmetrics from combining metrics over ranks if every rank has evaluated all batches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.sharding.dataset_digest import digest
from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import listening, value_in_force


@contextmanager
def whole_evaluations_not_joined(ranks: Ranks) -> Iterator[None]:
    """In the body, do not synchronize metrics that are the same on all ranks because all ranks got all batches.

    torchmetrics combines the states of all ranks if there is a process group, so each rank's samples would be counted.
    Metrics of divided batches are combined.

    Parameters
    ----------
    ranks : Ranks
        The ranks of the run.
    """
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    if metric is None:
        yield
        return
    with replaced(metric, "sync", _synchronized), listening(_synchronized, ranks):
        yield


def _synchronized(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def sync(self: Any, *args: Any, should_sync: bool = True, **kwargs: Any) -> None:
        ranks: Ranks = value_in_force(_synchronized)[-1]
        may_be_whole = should_sync and ranks.context.sharding.whole
        if not may_be_whole or len(set(ranks.gather(digest(self.metric_state)))) > 1:
            original(self, *args, should_sync=should_sync, **kwargs)

    return sync
