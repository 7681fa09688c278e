"""Rank 0's handle of a worker process: the stream to it, its output, and its end."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from typing_extensions import override

from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.failure import Failure, Kind, died
from nano_loop.distributed.launch.stream import Stream
from nano_loop.distributed.launch.workers import Worker
from nano_loop.distributed.launch_local import stack_dump
from nano_loop.distributed.launch_local.output import Output, pipe
from nano_loop.distributed.launch_local.server import HELLO, Server
from nano_loop.distributed.launch_local.start import start_of

_ENDED_BY_OTHERS = "Do not kill Python by name (pkill); if memory runs out, the kernel kills processes: see dmesg"
_ENDING = 3.0  # seconds for a killed process to end before its fork server is ended as well


class WorkerProcess(Worker):
    """A `Worker` on this host, whose output is shown if `verbose`; None hides standard error as well."""

    def __init__(self, server: Server, slot: RankSlot, verbose: bool | None = False) -> None:
        super().__init__(slot.ranks.rank)
        self._folder = str(slot.ranks.folder)
        self._server = server
        self._outputs: list[Output] = []
        self._failure: Failure | None = None
        self._end: dict[str, Any] | None = None  # how it ended, or why it could not start
        # The other ends belong to the worker.
        with contextlib.ExitStack() as own, contextlib.ExitStack() as others:
            ours, other = socket.socketpair()
            own.callback(ours.close)
            others.callback(other.close)
            self._stream = Stream(ours)
            descriptors = [other.fileno()]
            for shown in (sys.stdout if verbose else None, None if verbose is None else sys.stderr):
                reading, writing = pipe()
                own.callback(os.close, reading)
                others.callback(os.close, writing)
                self._outputs.append(Output(reading, shown, f"[rank {self.rank}] "))
                descriptors.append(writing)
            server.ask("fork", descriptors=descriptors, start=start_of(slot))
            self._resources = own.pop_all()

    @property
    def sources(self) -> Sequence[Any]:
        """See `Worker.sources`."""
        stream = [self._stream] if self._stream.is_open else []
        return [*stream, *self._server.sources, *(output.descriptor for output in self._outputs if output.is_open)]

    def poll(self) -> Failure | None:
        """See `Worker.poll`."""
        self._server.read_replies()
        ended = self._has_ended  # read first, so that all output is read after the end
        self._read()
        if self._failure is None and ended and not self.finished:
            return self._death()
        return self._failure

    def stack_dump(self) -> str:
        """See `Worker.stack_dump`."""
        self._ask("stack")
        return "" if self._has_ended else stack_dump.read(self._folder, self.rank, time.monotonic() + HELLO)

    def kill(self) -> None:
        """See `Worker.kill`."""
        if not self._server.ready:
            self._server.end()  # it is still importing, and would fork the worker first
        else:
            self._ask("kill")

    def close(self) -> None:
        """See `Worker.close`."""
        self.kill()
        began = time.monotonic()
        while not self._has_ended:
            if time.monotonic() > began + _ENDING:
                self._server.end()
                break
            wait([self._stream.fileno()], 0.1)
            self._read()
        self._read()
        for output in self._outputs:
            output.finish()
        self._outputs = []
        self._resources.close()

    @property
    def _has_ended(self) -> bool:
        """Whether it has ended, or will never start. Its fork server reports this, unless it was killed with it."""
        return self._end is not None or not self._stream.is_open

    def _ask(self, kind: str) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._stream.send(kind)

    def _read(self) -> None:
        """Process its reports, and show its output."""
        for output in self._outputs:
            output.relay()
        for header, content in self._stream.receive():
            self._take(header, content)

    def _take(self, header: dict[str, Any], content: bytes) -> None:
        """Process one report."""
        kind = header["kind"]
        self.ready = self.ready or kind == "ready"
        self.finished = self.finished or kind == "finished"
        if kind == "failed":
            self._failure = pickle.loads(content)
        elif kind in ("exited", "refused"):
            self._end = header

    def _death(self) -> Failure:
        """Return the failure of a process that has ended without a report."""
        if self._end is None:
            self._server.end()  # only its end closes the stream without a report
        end = self._end or {}
        refusal = self._server.refusal or end.get("reason")
        if refusal is not None:
            advice = "Allow more processes (ulimit -u, or the container's limit), or lower num_processes"
            return Failure(self.rank, Kind.CAUSE, f"could not be started ({refusal})", advice)
        exitcode = end.get("exitcode", self._server.exitcode)
        words = self._outputs[-1].last_words or self._server.output.last_words
        if exitcode is None:
            server = f" ({self._server.pid})" if self._server.gone and self._server.pid else ""
            what = f"ended with the process that it was forked from{server}, which was killed or failed"
            return Failure(self.rank, Kind.CAUSE, what, _ENDED_BY_OTHERS, traceback=words or None)
        return died(self.rank, exitcode, words)


_PATIENCE = 20.0  # seconds that rank 0 waits for it, plus N times its own running time


class WitnessProcess(WorkerProcess):
    """Rank 0's handle of the witness of a run that splits batches: a process that computes whole batches.

    Whatever happens to it, the run continues. Its number is one higher than the last rank, which gives its files a
    place.
    """

    def __init__(self, server: Server, first: RankSlot) -> None:
        ranks = first.ranks
        shares = (tuple(sorted({cpu for share in ranks.shares for cpu in share})),) if ranks.shares else ()
        own = Ranks(ranks.size, ranks.size + 1, shares=shares, folder=ranks.folder)
        self.why = ""  # the reason why there is nothing to compare; empty if there may be
        self._told: list[dict[str, Any]] = []
        self._began = time.monotonic()
        self._size, self._timeout = ranks.size, ranks.timeout
        super().__init__(server, RankSlot(own, first.machine, first.host), verbose=None)

    def wait_until_ready(self) -> None:
        """Wait until it has read the payload, for as long as this process has waited for the others."""
        self._wait(lambda: self.ready, lambda: None)

    def next(self, check: Callable[[], None], *, stays: bool = False) -> dict[str, Any] | None:
        """Return its report on the next backward or step, or None if there will be no more; see `why`."""
        self._wait(lambda: bool(self._told), check)
        return None if not self._told else self._told[0] if stays else self._told.pop(0)

    def _wait(self, done: Callable[[], bool], check: Callable[[], None]) -> None:
        came_in = time.monotonic() - self._began
        # The other ranks wait in the meantime, but no longer than the timeout.
        deadline = time.monotonic() + min(_PATIENCE + self._size * came_in, self._timeout / 2)
        while True:
            self._read()
            if self.why or done():
                return
            if self._failure is not None:
                self.why = f"it {self._failure.what}"
            elif self.finished or self._has_ended:
                self.why = "it has ended already"
            elif time.monotonic() > deadline:
                self.why = f"it took {deadline - self._began:.0f} s"
            else:
                check()
                wait([*self.sources], 0.1)

    @override
    def _take(self, header: dict[str, Any], content: bytes) -> None:
        if header["kind"] in ("backward", "step"):
            self._told.append(header)
        elif header["kind"] == "ends":
            self.why = header["why"]
        super()._take(header, content)
