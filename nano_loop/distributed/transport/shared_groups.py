"""The process groups of one run on one host: the default group, and those that the loop makes of some of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.transport.pipes import Pipes
from nano_loop.distributed.transport.shared_channel import SharedChannel
from nano_loop.distributed.transport.shared_group import SharedGroup


class SharedGroups:
    """The process groups of one run.

    Parameters
    ----------
    ranks : Ranks
        All ranks of the run.
    folder : pathlib.Path
        Their private folder.
    channel : SharedChannel
        Their channel, which the default process group uses.
    """

    def __init__(self, ranks: Ranks, folder: Path, channel: SharedChannel) -> None:
        self._ranks, self._folder, self._channel = ranks, folder, channel
        self._groups: list[SharedGroup] = []
        self._channels: dict[str, SharedChannel] = {}

    def make(self, options: Any, backend_options: Any = None) -> SharedGroup:
        """Make the group that torch describes by its ``_DistributedBackendOptions``; the first is the default group."""
        members = tuple(options.global_ranks_in_group) or tuple(range(self._ranks.size))
        name = f"{len(members)}-{options.group_id}"
        ranks = self._ranks_of(options)
        default = not options.global_ranks_in_group
        channel = (lambda: self._channel) if default else (lambda: self._channel_of(name, ranks, members))
        pipes = Pipes(ranks, self._folder, name, self._channel.segment, members)
        group = SharedGroup(ranks, channel, pipes, options.group_id)
        self._groups.append(group)
        return group

    def advance(self) -> None:
        """Carry on the messages of all groups."""
        for group in self._groups:
            group.advance()

    def close(self, *, returned: bool) -> None:
        """Leave the channels of all groups but the default one."""
        for channel in self._channels.values():
            channel.leave(returned=returned)
            channel.close()

    def _channel_of(self, name: str, ranks: Ranks, members: tuple[int, ...]) -> SharedChannel:
        if name not in self._channels:
            self._channels[name] = SharedChannel(ranks, self._folder, f"channel-{name}", names=members)
        return self._channels[name]

    def _ranks_of(self, options: Any) -> Ranks:
        outer = self._ranks
        timeout = min(options.timeout.total_seconds(), outer.timeout)
        # `check` is looked up each time: whoever watches the ranks may set it later.
        return Ranks(
            options.group_rank,
            options.group_size,
            timeout=timeout,
            check=lambda: outer.check(),
            context=outer.context,
        )
