"""The rendezvous of an external launch: what its processes tell each other before they are connected, as JSON."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from nano_loop.distributed.comm.process_group_channel import ProcessGroupChannel
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.shared_folder import private_folder, refuse_foreign_folder, shared_memory_device
from nano_loop.errors import NanoError, RankLateError, error_message

_INTERVAL = 0.01  # seconds between two looks at a store, which may be on another host
_LONGEST = 1 << 20  # characters of a text
#: A file that is newer than what was there before the run, and older than all that a rank does in the run.
BEGAN = "began"

#: Returns the texts of all ranks, by rank, when all have called it with theirs.
Gather = Callable[[str], list[str]]


class Host(NamedTuple):
    """What identifies a host; a container with its own shared memory counts as one."""

    name: str
    boot: str
    shared_memory: int


class Presence(NamedTuple):
    """What a process says of itself when it joins.

    Attributes
    ----------
    host : Host
        Where it is.
    cpus : tuple of int
        The logical CPUs that it may use.
    """

    host: Host
    cpus: tuple[int, ...]

    def as_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str, rank: int) -> Presence:
        """Read what a rank has said.

        Raises
        ------
        NanoError
            If it is something else.
        """
        match _read(text, rank):
            case [[str(), str(), int()] as host, [*cpus]] if {*map(type, cpus)} <= {int}:
                return cls(Host(*host), tuple(cpus))
        raise NanoError(_malformed(text, rank))


def this_host() -> Host:
    """Return the host of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return Host(socket.gethostname(), boot, shared_memory_device())


def gather_at(store: Store, ranks: Ranks) -> Gather:
    """Return a way to exchange texts at a store that no other run uses; every wait calls `Ranks.check`."""
    rounds = itertools.count()

    def gather(text: str) -> list[str]:
        number = next(rounds)
        keys = [f"{number}/{rank}" for rank in range(ranks.size)]
        store.set(keys[ranks.rank], text)
        deadline = time.monotonic() + ranks.timeout
        for rank, key in enumerate(keys):
            while not store.check([key]):
                ranks.check()
                if time.monotonic() > deadline:
                    raise RankLateError(_is_late(rank, ranks), rank)
                time.sleep(_INTERVAL)
        return [store.get(key).decode(errors="replace") for key in keys]

    return gather


def gather_in_group(ranks: Ranks) -> Gather:
    """Return a way to exchange texts in the process group that the user has made."""
    channel = ProcessGroupChannel(ranks)
    return lambda text: [data.decode(errors="replace") for data in channel.gather(text.encode())]


@contextmanager
def common_folder(rank: int, gather: Gather, here: list[int], parent: Path | None = None) -> Iterator[Path]:
    """Give the private folder that the first of the ranks of this host makes for them, with `BEGAN` in it. Collective.

    Parameters
    ----------
    rank : int
        This one.
    gather : callable
        See `Gather`.
    here : list of int
        Those of this host.
    parent : Path or None
        A private folder of this process, in which the folder is made.
    """
    with _made(parent) if rank == here[0] else nullcontext() as made:
        name = _read(gather(json.dumps(made and str(made)))[here[0]], here[0])
        folder = Path(name if isinstance(name, str) else "")
        refuse_foreign_folder(folder)
        yield folder


@contextmanager
def _made(parent: Path | None) -> Iterator[Path]:
    if parent is not None:
        folder = parent / "host"
        folder.mkdir(mode=0o700)
        yield folder
        return
    with private_folder() as folder:
        (folder / BEGAN).touch()
        yield folder


def _read(text: str, rank: int) -> Any:
    """Return what is in the JSON that a rank has sent; raise a NanoError if it is none."""
    try:
        if len(text) > _LONGEST:
            raise ValueError("too long")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NanoError(_malformed(text, rank)) from error


def _malformed(text: str, rank: int) -> str:
    got = f"rank {rank} has sent {text[:100]!r}"
    expected = "a rank begins with its host and its CPUs, as nano_loop writes them"
    return error_message(got, expected, "Run the same version of nano_loop on every host")


def _is_late(rank: int, ranks: Ranks) -> str:
    got = f"rank {ranks.rank} has waited {ranks.timeout:g} seconds for rank {rank} to join the run"
    hint = f"Check what rank {rank} is doing, or pass a longer timeout if it is working"
    return error_message(got, "every rank has to get there within the timeout", hint)
