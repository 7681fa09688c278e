"""Processes that are forked ahead of a run, so that it need not wait for them: each becomes a worker when it is needed.

They are forked when the workers of a run have ended, one for each of them, for the next run has most likely as many.
A process that waits uses no CPU and holds nothing of the caller's: it is as clean as one that is forked later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from nano_loop.distributed.launch.local.frames import Frames, framed

#: Descriptors that come with each request for a worker: reports, standard output, standard error.
STREAMS = 3


class Spares:
    """Those of one process that forks workers.

    Attributes
    ----------
    expected : int
        How many workers the next run will ask for, as far as that is known.
    """

    def __init__(self) -> None:
        self.expected = 0
        self._waiting: dict[int, socket.socket] = {}  # the connections to them, by their processes

    @property
    def are_missing(self) -> bool:
        """Whether more of them are expected to be needed than there are."""
        return len(self._waiting) < self.expected

    @property
    def processes(self) -> list[int]:
        """Their numbers."""
        return [*self._waiting]

    def fork(self, become_worker: Callable[[Wait], NoReturn]) -> None:
        """Fork one more.

        Parameters
        ----------
        become_worker : callable
            Is called in the new process, with what waits until it is needed.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError:  # too many open files: the run forks its worker itself
            self.expected = 0
            return
        with theirs:
            try:
                pid = forked()
            except OSError:
                self.expected = 0
                ours.close()
                return
            if pid == 0:
                ours.close()
                self.leave()
                become_worker(Wait(theirs))
        self._waiting[pid] = ours

    def take(self, start: str, streams: Sequence[int]) -> int | None:
        """Let one of them be the worker that a file describes; return its number, or None where there is none."""
        while self._waiting:
            pid, connection = self._waiting.popitem()
            with connection, contextlib.suppress(OSError):
                socket.send_fds(connection, [framed({"start": start})], streams)
                return pid
            self._end(pid)
        return None

    def forget(self, pid: int) -> None:
        """Forget one that has ended by itself, and has been waited for."""
        self._waiting.pop(pid).close()

    def clear(self) -> None:
        """End all of them: they lack what has been imported since."""
        while self._waiting:
            pid, connection = self._waiting.popitem()
            connection.close()
            self._end(pid)

    def leave(self) -> None:
        """Close the connections, in a process that is one of the workers itself."""
        for each in self._waiting.values():
            each.close()
        self._waiting.clear()

    def _end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Wait:
    """The wait of one of them until it is needed.

    Parameters
    ----------
    connection : socket.socket
        To the process that has forked it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def is_over_within(self, seconds: float) -> bool:
        """Whether the process is needed, or becomes so in that time."""
        return bool(select.select([self._connection], [], [], seconds)[0])

    def until_needed(self) -> tuple[str, list[int]]:
        """Return the path of the file that says which worker it is, and the worker's streams; end if nobody asks."""
        frames, streams = Frames(), list[int]()
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, STREAMS)
            if not data:
                os._exit(0)
            streams += descriptors
            for header, _ in frames.feed(data):
                self._connection.close()
                return header["start"], streams


def forked() -> int:
    """Do what `os.fork` does."""
    with warnings.catch_warnings():
        # Python warns of threads: numpy's linear algebra has some, and makes them anew in the child.
        warnings.simplefilter("ignore")
        return os.fork()
