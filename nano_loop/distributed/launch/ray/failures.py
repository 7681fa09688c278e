"""The failures of actors, each with the node that it was on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from nano_loop.distributed.launch.failure import Failure, Kind

#: For an actor that has ended: Ray tells no signal.
ADVICE = (
    "See its standard error and Ray's logs on that node; if memory ran out there, lower the batch size or the ranks "
    "of a node (a larger cpu_for_each_process)"
)
_LONGEST = 2000  # characters


def failure_of(said: Mapping[str, Any], node: str) -> Failure:
    """Return the failure that an actor has returned, with its node in the message."""
    failure = Failure.of_words(said["failure"])
    failure.pickled = said["exception"]
    if failure.kind is not Kind.LEFT and failure.late is None:
        failure.what = f"on {node} {failure.what}"
    return failure


def lost(rank: int, node: str, error: BaseException) -> Failure:
    """Return the failure of an actor that Ray says has ended."""
    reason = " ".join(str(error).split())
    with contextlib.suppress(ValueError):  # Ray's text goes on with ids and hints for its own developers
        reason = reason[: reason.index(" class_name:")] + reason[reason.index(" The actor ") :]
    what = f"on {node} ended its process"
    return Failure(rank, Kind.CAUSE, what, ADVICE, traceback=f"Ray says: {reason[:_LONGEST]}")
