"""How the ranks of an external launch are connected once they know which host each is on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from nano_loop.distributed.launch.external.liveness import Liveness
from nano_loop.distributed.launch.external.meeting import Meeting, read
from nano_loop.distributed.launch.group import leaders_group, local_group, process_group, shared_channel
from nano_loop.distributed.launch.shared_folder import private_folder, refuse_foreign_folder
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.transport.shared_channel import SharedChannel


class Connecting(Protocol):
    """How the ranks get a process group, once they know where they are."""

    def on_one_host(self, ranks: Ranks, folder: Path) -> AbstractContextManager[object]:
        """Return a context in which they also have a channel through shared memory."""

    def between_hosts(self, ranks: Ranks, members: list[list[int]]) -> AbstractContextManager[object]:
        """Return a context with a process group, which gives a group of the first ranks of hosts with these ranks.

        None where the ranks are not connected by gloo.
        """


class ByBackend(NamedTuple):
    """The ranks make a process group."""

    store: Store
    backend: str | None
    address: str | None

    def on_one_host(self, ranks: Ranks, folder: Path) -> AbstractContextManager[object]:
        """See `Connecting.on_one_host`."""
        return local_group(ranks, self.backend)

    @contextmanager
    def between_hosts(self, ranks: Ranks, members: list[list[int]]) -> Iterator[object]:
        """See `Connecting.between_hosts`."""
        with ExitStack() as stack:
            stack.enter_context(process_group(self.store, ranks, self.backend, address=self.address))
            yield stack.enter_context(leaders_group(ranks, members, address=self.address))


class InGroupOfUser:
    """The user has made a process group already."""

    def on_one_host(self, ranks: Ranks, folder: Path) -> AbstractContextManager[object]:
        """See `Connecting.on_one_host`."""
        return shared_channel(ranks, folder)

    def between_hosts(self, ranks: Ranks, members: list[list[int]]) -> AbstractContextManager[object]:
        """See `Connecting.between_hosts`."""
        return leaders_group(ranks, members)


@contextmanager
def common_folder(everyone: Ranks, meeting: Meeting, here: list[int], parent: Path | None = None) -> Iterator[Path]:
    """Give the private folder that the first of the ranks of this host makes for them. Collective.

    Parameters
    ----------
    everyone : Ranks
        All ranks.
    meeting : Meeting
        Where they meet.
    here : list of int
        Those of this host.
    parent : Path or None
        A private folder of this process, in which the folder is made.
    """
    with _made(parent) if everyone.rank == here[0] else nullcontext() as made:
        told = read(meeting.gather(json.dumps(made and str(made)))[here[0]], here[0])
        folder = Path(told if isinstance(told, str) else "")
        refuse_foreign_folder(folder)
        yield folder


def _made(parent: Path | None) -> AbstractContextManager[Path]:
    if parent is None:
        return private_folder()
    folder = parent / "host"
    folder.mkdir(mode=0o700)
    return nullcontext(folder)


@contextmanager
def connected_on_one_host(connecting: Connecting, ranks: Ranks, folder: Path) -> Iterator[None]:
    """Connect ranks that see each other's ends by themselves: no launcher of ours watches them."""
    launcher_s = ranks.check
    left = _Left()
    liveness = Liveness(ranks, folder, left)

    def check() -> None:
        launcher_s()
        liveness.check()

    ranks.check = check
    try:
        with connecting.on_one_host(ranks, folder):
            left.channel = ranks.channel
            yield
    finally:
        if ranks.rank != 0 and liveness.is_dead(0):
            shutil.rmtree(folder, ignore_errors=True)  # rank 0 would have
        ranks.check = launcher_s
        liveness.close()


class _Left:
    """Whether a rank has left the channel, once there is one."""

    channel: object = None

    def __call__(self, rank: int) -> bool:
        return isinstance(self.channel, SharedChannel) and self.channel.segment.has_left(rank)
