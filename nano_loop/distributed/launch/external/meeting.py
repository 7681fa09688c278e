"""What the processes of an external launch tell each other before they trust each other: texts, as JSON."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, NamedTuple, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from nano_loop.distributed.channel import Channel
from nano_loop.distributed.ranks import Ranks
from nano_loop.errors import NanoError, problem

_INTERVAL = 0.01  # seconds between two looks at a store, which may be on another host
_LONGEST = 1 << 20  # characters of a text


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
    nonce : str
        Its random part of what only this run has.
    signs : bool
        Whether it has a secret to sign messages with.
    """

    host: Host
    cpus: tuple[int, ...]
    nonce: str
    signs: bool

    @classmethod
    def here(cls, host: Host, cpus: tuple[int, ...], *, signs: bool) -> Presence:
        """Return that of this process."""
        return cls(host, cpus, secrets.token_hex(16), signs)

    def as_text(self) -> str:
        """Return it as JSON."""
        return json.dumps([[*self.host], [*self.cpus], self.nonce, self.signs])

    @classmethod
    def from_text(cls, text: str, rank: int) -> Presence:
        """Read what a rank has said.

        Raises
        ------
        NanoError
            If it is something else.
        """
        found = read(text, rank)
        if not (_is(found, list, list, str, bool) and _is(found[0], str, str, int) and _all_of(found[1], int)):
            raise NanoError(_malformed(text, rank))
        return cls(Host(*found[0]), tuple(found[1]), found[2], found[3])


class Meeting(Protocol):
    """Where the processes of a launch exchange texts, before they are connected."""

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank. Collective."""


class StoreMeeting:
    """A meeting at a store. See `Meeting`.

    Parameters
    ----------
    store : torch.Store
        Used by no other run.
    ranks : Ranks
        Who meets; every wait calls its `check`.
    """

    def __init__(self, store: Store, ranks: Ranks) -> None:
        self._store = store
        self._ranks = ranks
        self._gathered = 0

    def gather(self, text: str) -> list[str]:
        """See `Meeting.gather`."""
        self._gathered += 1
        keys = [f"{self._gathered}/{rank}" for rank in range(self._ranks.size)]
        self._store.set(keys[self._ranks.rank], text)
        deadline = time.monotonic() + self._ranks.timeout
        for rank, key in enumerate(keys):
            while not self._store.check([key]):
                self._ranks.check()
                if time.monotonic() > deadline:
                    raise NanoError(_is_late(rank, self._ranks))
                time.sleep(_INTERVAL)
        return [self._store.get(key).decode(errors="replace") for key in keys]


class GroupMeeting:
    """A meeting in a process group that the user has made. See `Meeting`.

    Parameters
    ----------
    channel : Channel
        Over that group.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def gather(self, text: str) -> list[str]:
        """See `Meeting.gather`."""
        return [each.decode(errors="replace") for each in self._channel.gather(text.encode())]


def read(text: str, rank: int) -> Any:
    """Return what is in the JSON that a rank has sent; raise a NanoError if it is none."""
    try:
        if len(text) > _LONGEST:
            raise ValueError("too long")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NanoError(_malformed(text, rank)) from error


def _is(found: Any, *kinds: type) -> bool:
    """Whether something is a list of objects of just these types."""
    return type(found) is list and [type(each) for each in found] == [*kinds]


def _all_of(found: list[Any], kind: type) -> bool:
    return all(type(each) is kind for each in found)


def _malformed(text: str, rank: int) -> str:
    given = f"rank {rank} has sent {text[:100]!r}"
    needed = "a rank begins with its host and its CPUs, as nano_loop writes them"
    return problem(given, needed, "Run the same version of nano_loop on every host")


def _is_late(rank: int, ranks: Ranks) -> str:
    given = f"rank {ranks.rank} has waited {ranks.timeout:g} seconds for rank {rank} to join the run"
    advice = f"Check what rank {rank} is doing, or pass a longer timeout if it is working"
    return problem(given, "every rank has to get there within the timeout", advice)
