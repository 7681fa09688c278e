"""One actor as rank 0 sees it: a `Worker` of the run."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from nano_loop.distributed.launch.failure import Failure
from nano_loop.distributed.launch.local.frames import Frames, read_available
from nano_loop.distributed.launch.local.output import Output
from nano_loop.distributed.launch.local.worker_warnings import Awaiting
from nano_loop.distributed.launch.ray.cluster import Actor, has_ended
from nano_loop.distributed.launch.ray.rank_connections import ask

_SILENCE = 0.7  # seconds from the end of a connection to the news of what has ended it; an echo waits longer
_ANSWER = 1.0  # seconds that a rank has to say where it is
_ENDING = 10.0  # seconds that a killed process may take to end


class ActorProcess:
    """A `Worker` that is an actor of Ray, and is doing the task.

    Parameters
    ----------
    actor : Actor
        The actor.
    connection : socket.socket
        Rank 0's end of its connection.
    """

    def __init__(self, actor: Actor, connection: socket.socket) -> None:
        self.rank = actor.rank
        self.ready, self.finished = True, False  # an actor that has not read its payload is no worker yet
        self._actor, self._connection = actor, connection
        self._running: Any = None
        self._frames = Frames()
        self._warnings = Awaiting()
        self._silent_since: float | None = None
        self._failure: Failure | None = None
        self._answers: list[str] = []
        self._reading = threading.Lock()

    def run(self, *args: Any) -> None:
        """Have the actor run the task, before anything else is called."""
        self._running = self._actor.call("run", *args)

    @property
    def sources(self) -> Sequence[Any]:
        """See `Worker.sources`."""
        return [self._connection.fileno()] if self._silent_since is None else []

    def poll(self) -> Failure | None:
        """See `Worker.poll`."""
        self._read()
        if self._failure is None and not self.finished:
            self._failure = self._outcome()
        return self._failure

    def stack_dump(self) -> str:
        """See `Worker.stack_dump`."""
        self._answers.clear()
        ask(self._connection)
        deadline = time.monotonic() + _ANSWER
        while not self._answers and self.sources and time.monotonic() < deadline:
            self._read()  # the thread that watches may be this one
            time.sleep(0.02)
        return self._answers[0] if self._answers else ""

    def kill(self) -> None:
        """See `Worker.kill`."""
        self._actor.kill()

    def close(self) -> None:
        """See `Worker.close`."""
        self.kill()
        deadline = time.monotonic() + _ENDING
        while self._silent_since is None and time.monotonic() < deadline:
            self._read()
            time.sleep(0.01)
        self._warnings.show(Output(-1, sys.stderr, f"[rank {self.rank}] ").say)
        self._connection.close()
        self._running = None

    def _outcome(self) -> Failure | None:
        """Return how the task has failed, if it has; note that it has returned."""
        if self._running is not None and has_ended(self._running):
            failure: Failure | None = self._actor.result(self._running)
            self.finished = failure is None
            return failure
        if self._silent_since is None or time.monotonic() < self._silent_since + _SILENCE:
            return None
        return self._actor.failure("is gone: its process or its node has ended")  # and Ray says nothing yet

    def _read(self) -> None:
        with self._reading:
            if self._silent_since is not None:
                return
            try:
                data, ended = read_available(self._connection.fileno())
            except OSError:  # the kernel has given the other host up
                data, ended = b"", True
            for header, content in self._frames.feed(data):
                if header["kind"] == "warning":
                    self._warnings.take(header)
                elif header["kind"] == "whereabouts":
                    self._answers.append(content.decode(errors="replace"))
            if ended:
                self._silent_since = time.monotonic()
