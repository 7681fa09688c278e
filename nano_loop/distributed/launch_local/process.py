"""A worker process as rank 0 has it: the pipes from it, what it writes, and how it ends."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from nano_loop.distributed.comm.limits import limit_in_words
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.launch.failure import Failure, Kind, died
from nano_loop.distributed.launch.reports import CUT_OFF, DUMP, KILL, Frames, ReportingWorker, read_available
from nano_loop.distributed.launch_local import stack_dump
from nano_loop.distributed.launch_local.output import Output, pipe
from nano_loop.distributed.launch_local.server import HELLO, NO_SIGNAL, Server
from nano_loop.distributed.launch_local.start import start_of
from nano_loop.errors import NanoWorkerError, error_message

_TAKES = "each worker process takes three pipes and a socket"
_ENDED_BY_OTHERS = "End no Python by its name (pkill); where memory runs out, the kernel ends processes: see dmesg"
_ENDING = 10.0  # seconds that a killed process may take to end


class WorkerProcess(ReportingWorker):
    """A `Worker` that is a process of this host, with the pipes from it.

    Parameters
    ----------
    server : Server
        Forks it.
    slot : RankSlot
        Its place.
    verbose : bool
        Whether what it prints is shown.
    """

    def __init__(self, server: Server, slot: RankSlot, verbose: bool = False) -> None:
        super().__init__(slot.ranks.rank)
        self._folder = str(slot.ranks.folder)
        self._server = server
        self._replies: dict[str, Any] = {}  # what the server tells of it
        self._reply_frames = Frames()
        self._channel_is_open = True
        self._outputs: list[Output] = []
        self._resources = contextlib.ExitStack()
        try:
            self._channel = self._forked(start_of(slot), sys.stdout if verbose else None, sys.stderr)
        except BaseException:
            self._resources.close()
            raise

    @property
    def sources(self) -> Sequence[Any]:
        """See `Worker.sources`."""
        outputs = [output.descriptor for output in self._outputs if output.is_open]
        return [*super().sources, *self._server_sources, *outputs]

    def has_ended(self) -> bool:
        """See `ReportingWorker.has_ended`."""
        self._read_replies()
        return self._has_ended

    def stack_dump(self) -> str:
        """See `Worker.stack_dump`."""
        self._replies.pop("state", None)
        self._ask(DUMP)
        deadline = time.monotonic() + HELLO
        while "state" not in self._replies and not self._has_ended and time.monotonic() < deadline:
            wait(self._server_sources, 0.02)
            self._read_replies()
        if self._replies.get("state") in stack_dump.STOPPED:
            return "it is stopped, by SIGSTOP or a debugger; kill -CONT makes it go on"
        return stack_dump.read(self._folder, self.rank, deadline)

    def kill(self) -> None:
        """See `Worker.kill`."""
        if not self._server.ready:
            self._server.end()  # it imports, and would fork the worker first
        else:
            self._ask(KILL)

    def close(self) -> None:
        """See `Worker.close`."""
        self.kill()
        began = time.monotonic()
        while not self._has_ended:
            waited = time.monotonic() - began
            if waited > _ENDING or (waited > HELLO and not self._server.answers()):
                self._server.end()
                break
            wait(self._server_sources, 0.1)
            self._read_replies()
        self._channel_is_open = False
        self._channel.close()
        self.read_reports()
        for output in self._outputs:
            output.finish()
        self._outputs = []
        self.reports = None
        self._resources.close()

    @property
    def _server_sources(self) -> Sequence[Any]:
        """What is readable when the server has told something."""
        return [*self._server.sources, *([self._channel] if self._channel_is_open else [])]

    @property
    def _has_ended(self) -> bool:
        """Whether it has ended, or will never begin. Who has forked it says so, unless that was killed with it."""
        return self._server.gone or not self._channel_is_open or bool({"exited", "refused"} & {*self._replies})

    def _read_replies(self) -> None:
        """Take in what the server has told, without waiting."""
        with self._server.reading:
            self._server.read_replies()
            if self._channel_is_open:
                data, closed = read_available(self._channel)
                self._channel_is_open = not closed
                for header, _ in self._reply_frames.feed(data):
                    self._replies.update(header)

    def _ask(self, request: bytes) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(request, NO_SIGNAL)

    def _forked(self, start: dict[str, Any], *shown: Any) -> socket.socket:
        """Have it forked with three pipes: its reports, its standard output and its standard error."""
        with contextlib.ExitStack() as stack:  # of the other ends, which only the worker keeps
            pipes = []
            for _ in range(3):
                pipes.append(pipe())
                self._resources.callback(os.close, pipes[-1][0])
                stack.callback(os.close, pipes[-1][1])
            (self.reports, *outputs), writing = zip(*pipes, strict=True)
            self._outputs = [Output(*output, f"[rank {self.rank}] ") for output in zip(outputs, shown, strict=True)]
            return self._server.fork(start, writing)

    def silence(self) -> Failure:
        """See `ReportingWorker.silence`."""
        what = "has closed its connection to rank 0, or ended"
        advice = "Close only descriptors that the loop has opened itself (see os.closerange, subprocess.Popen)"
        return Failure(self.rank, Kind.CAUSE, what, advice, traceback=self._outputs[-1].last_words or None)

    def death(self) -> Failure:
        """See `ReportingWorker.death`."""
        refusal = self._server.refusal or self._replies.get("refused")
        words = self._outputs[-1].last_words or self._server.last_words if self._outputs else ""
        if refusal is not None:
            advice = "Allow more processes (ulimit -u, or the container's limit), or lower num_processes"
            return Failure(self.rank, Kind.CAUSE, f"could not be started ({refusal})", advice)
        exitcode = self._replies.get("exited", self._server.exitcode)
        if exitcode == CUT_OFF:
            return self.silence()
        if exitcode is None and self._server.pid is not None:
            server = f" ({self._server.pid})" if self._server.gone else ""
            what = f"ended with the process that it was forked from{server}, which was killed or has failed"
            return Failure(self.rank, Kind.CAUSE, what, _ENDED_BY_OTHERS, traceback=words or None)
        return died(self.rank, exitcode, words)

    def read_reports(self) -> None:
        """See `ReportingWorker.read_reports`; what it writes to its standard streams is shown."""
        for output in self._outputs:
            output.relay()
        super().read_reports()


def forked(server: Server, slots: Sequence[RankSlot], verbose: bool = False) -> list[WorkerProcess]:
    """Return a new worker for each; if one cannot be started, end the others and raise a `NanoWorkerError`."""
    workers: list[WorkerProcess] = []
    with contextlib.ExitStack() as stack:
        for slot in slots:
            try:
                workers.append(WorkerProcess(server, slot, verbose))
            except OSError as error:
                rank, folder = slot.ranks.rank, slot.ranks.folder
                words = limit_in_words(error, folder) if folder is not None else None
                reason = f"rank {rank} could not be started ({error})"
                message = error_message(reason, *(words or (_TAKES, "Check that folder")))
                raise NanoWorkerError(message, rank=rank) from error
            stack.callback(workers[-1].close)
        stack.pop_all()
    return workers
