"""The state of sharding: whether the ranks of a run divide its work, or all compute the same."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ShardingState:
    """What one rank knows of how the work of its run is divided.

    Attributes
    ----------
    delivered : bool
        Whether a divided loader has delivered a batch since the last averaging of gradients.
    undivided : bool
        Whether all ranks computed the same when they compared it last; the same on all ranks.
    chosen : bool
        Whether the latest batch came from a loader that ``shard=False`` keeps whole.
    implicit_loaders : bool
        Whether a loader that was not set up was divided.
    warnings_given : set of str
        The warnings that the run has given.
    """

    delivered: bool = False
    undivided: bool = False
    chosen: bool = False
    implicit_loaders: bool = False
    warnings_given: set[str] = field(default_factory=set)
