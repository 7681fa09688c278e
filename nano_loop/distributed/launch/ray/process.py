"""One actor as rank 0 sees it: a `Worker` of the run."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from nano_loop.distributed.launch.failure import Failure, Kind
from nano_loop.distributed.launch.local.frames import Frames, read_available
from nano_loop.distributed.launch.local.output import Output
from nano_loop.distributed.launch.local.warned import Awaiting
from nano_loop.distributed.launch.ray.failures import ADVICE, failure_of, lost
from nano_loop.distributed.launch.ray.lifeline import ask

_SILENCE = 0.7  # seconds from the end of a connection to the news of what has ended it; an echo waits longer
_ANSWER = 1.0  # seconds that a rank has to say where it is
_ENDING = 10.0  # seconds that a killed process may take to end


class ActorProcess:
    """A `Worker` that is an actor of Ray.

    Parameters
    ----------
    rank : int
        Its rank.
    node : str
        Where it is, in words.
    actor : nano_loop.distributed.launch.ray.cluster.Actor
        The actor.
    connection : socket.socket
        Rank 0's end of its lifeline.
    """

    def __init__(self, rank: int, node: str, actor: Any, connection: socket.socket) -> None:
        self.rank = rank
        self.ready, self.finished = True, False  # an actor that has not read its payload is no worker yet
        self._node, self._actor, self._connection = node, actor, connection
        self._running: Any = None
        self._frames = Frames()
        self._warnings = Awaiting()
        self._silent_since: float | None = None
        self._failure: Failure | None = None
        self._answer: str | None = None
        self._answered = threading.Event()
        self._is_open = True
        self._reading = threading.Lock()

    def run(self, *args: Any) -> None:
        """Have the actor run the task, before anything else is called."""
        self._running = self._actor.call("run", *args)

    @property
    def sources(self) -> Sequence[Any]:
        """See `Worker.sources`."""
        return [self._connection.fileno()] if self._is_open else []

    def poll(self) -> Failure | None:
        """See `Worker.poll`."""
        self._read()
        if self._failure is None and not self.finished:
            self._failure = self._outcome() or self._loss()
        return self._failure

    def stack_dump(self) -> str:
        """See `Worker.stack_dump`."""
        self._answered.clear()
        ask(self._connection)
        deadline = time.monotonic() + _ANSWER
        while not self._answered.wait(0.02) and self._is_open and time.monotonic() < deadline:
            self._read()  # the thread that watches may be this one
        return (self._answer or "") if self._answered.is_set() else ""

    def kill(self) -> None:
        """See `Worker.kill`."""
        self._actor.kill()

    def close(self) -> None:
        """See `Worker.close`."""
        self.kill()
        deadline = time.monotonic() + _ENDING
        while self._is_open and time.monotonic() < deadline:
            self._read()
            time.sleep(0.01)
        self._warnings.show(Output(-1, sys.stderr, f"[rank {self.rank}] ").say)
        self._is_open = False
        self._connection.close()
        self._running = None

    def _outcome(self) -> Failure | None:
        """Return how the task has failed, if it has; note that it has returned."""
        from nano_loop.distributed.launch.ray import cluster  # which imports Ray

        if self._running is None or not cluster.completed([self._running], 0):
            return None
        try:
            said = cluster.result(self._running)
        except cluster.RayError as error:
            return lost(self.rank, self._node, error)
        if said is None:
            self.finished = True
            return None
        return failure_of(said, self._node)

    def _loss(self) -> Failure | None:
        """Return the failure of a process whose connection has ended, and of which Ray says nothing yet."""
        if self._silent_since is None or time.monotonic() < self._silent_since + _SILENCE:
            return None
        return Failure(self.rank, Kind.CAUSE, f"on {self._node} is gone: its process or its node has ended", ADVICE)

    def _read(self) -> None:
        with self._reading:
            self._read_what_is_there()

    def _read_what_is_there(self) -> None:
        if not self._is_open:
            return
        try:
            data, ended = read_available(self._connection.fileno())
        except OSError:  # the kernel has given the other host up
            data, ended = b"", True
        for header, content in self._frames.feed(data):
            if header["kind"] == "warning":
                self._warnings.take(header)
            elif header["kind"] == "whereabouts":
                self._answer = content.decode(errors="replace")
                self._answered.set()
        if ended:
            self._is_open = False
            self._silent_since = time.monotonic()
