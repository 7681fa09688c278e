"""A process that has imported the modules of a call, as the process has it that it was forked from."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nano_loop.distributed.launch.reports import Frames, framed, read_available
from nano_loop.distributed.launch_local import stack_dump
from nano_loop.distributed.launch_local.shared_imports import Stamp, are_unchanged

_ENDING = 1.0  # seconds that it may take to end its workers


class WorkerRequest(NamedTuple):
    """A request of the caller's for a worker, with the descriptors that have come with it."""

    start: dict[str, Any]  # what `nano_loop.distributed.launch_local.start.start_of` has returned
    channel: socket.socket
    streams: list[int]  # its reports, its standard output, its standard error

    def close(self) -> None:
        """Close the descriptors in this process."""
        self.close_streams()
        self.channel.close()

    def close_streams(self) -> None:
        """Close those that are the worker's alone."""
        for descriptor in self.streams:
            os.close(descriptor)


class ImportKey(NamedTuple):
    """What the result of imports depends on, where workers of a fork server differ."""

    modules: tuple[str, ...]  # in the order of their import
    working_folder: str | None
    script: str | None
    argv: tuple[str, ...]

    @classmethod
    def of(cls, start: Mapping[str, Any], modules: Iterable[str]) -> ImportKey:
        """Return that of modules in a worker."""
        return cls(tuple(modules), start["working_folder"], start["script"], tuple(start["argv"]))

    def has(self, other: ImportKey) -> bool:
        """Whether whoever has imported this has imported the other one, too."""
        return {*self.modules} >= {*other.modules} and self[1:] == other[1:]

    def joined(self, other: ImportKey) -> ImportKey:
        """Return the other one, with the modules of this one if they were imported under the same conditions."""
        modules = dict.fromkeys((*self.modules, *other.modules))
        return other._replace(modules=tuple(modules)) if self[1:] == other[1:] else other


class Importer:
    """A child of a fork server, which forks the workers that need what it has imported.

    Parameters
    ----------
    pid : int
        Its process.
    control : socket.socket
        A stream socket to it.
    key : ImportKey
        What it has imported, or is about to.

    Attributes
    ----------
    stamps : dict of str to Stamp, or None
        The files that the imports have read; None until they have ended.
    """

    def __init__(self, pid: int, control: socket.socket, key: ImportKey) -> None:
        self.pid = pid
        self.control = control
        self.key = key
        self.stamps: dict[str, Stamp] | None = None
        self._frames = Frames()

    @property
    def is_current(self) -> bool:
        """Whether it is there, and an import would do the same now."""
        if self.stamps is None:
            return True
        return stack_dump.state_of(self.pid) not in stack_dump.STOPPED and are_unchanged(self.stamps)

    def send(self, request: WorkerRequest) -> None:
        """Have it fork a worker; the descriptors are its own from now on."""
        message = framed({"ask": "fork", "start": {**request.start, "modules": []}})
        sent = socket.send_fds(self.control, [message], [request.channel.fileno(), *request.streams])
        self.control.sendall(message[sent:])
        request.close()

    def has_closed(self) -> bool:
        """Take in what it has said; return whether it has ended."""
        data, has_ended = read_available(self.control)
        for header, _ in self._frames.feed(data):
            self.stamps = header["stamps"]
        return has_ended

    def retire(self) -> bool:
        """Have it end when its last worker has; return whether it will."""
        if stack_dump.state_of(self.pid) in stack_dump.STOPPED:
            return False
        with contextlib.suppress(OSError):  # it has ended, which is about to be heard
            self.control.sendall(framed({"ask": "retire"}))
        return True

    def end(self) -> None:
        """End it, and its workers with all that they have started."""
        if self.stamps is not None:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
                select.select([self.control], [], [], _ENDING)
        self.control.close()
        kill_group(self.pid)
        os.waitpid(self.pid, 0)


def kill_group(leader: int) -> None:
    """Kill a process that nobody has waited for yet, and all that it has started."""
    for kill in (os.killpg, os.kill):  # between its fork and its setsid it has no group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)
