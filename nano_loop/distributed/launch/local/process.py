"""One worker process as rank 0 has it: its pipes, what it writes, and how it ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from nano_loop.distributed.launch.failure import Failure, died
from nano_loop.distributed.launch.local.start import Start, command
from nano_loop.errors import NanoWorkerError, problem

_LAST_WORDS = 4000  # characters of standard error that are kept for a message


class WorkerProcess:
    """A `Worker` that is a process of this host, with the pipes to and from it."""

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.ready = self.finished = False
        self._last_words = ""
        reading, writing = os.pipe()
        self._reports: Connection[Any, Any] | None = Connection(reading, writable=False)
        try:
            self._process = _popen(start, writing)
        except BaseException:
            self._reports.close()
            raise
        finally:
            os.close(writing)
        self._outputs = {
            stream: getattr(sys, name)
            for name, stream in (("stderr", self._process.stderr), ("stdout", self._process.stdout))
            if stream is not None
        }
        self._lines = dict.fromkeys(self._outputs, b"")
        self._write(start.as_line(writing))

    def go(self) -> None:
        """Tell the process that its payload can be read."""
        self._write(b"\n")

    @property
    def sources(self) -> Sequence[Any]:
        """See `Worker.sources`."""
        return [*self._outputs, *([self._reports] if self._reports else [])]

    def poll(self) -> Failure | None:
        """See `Worker.poll`."""
        return self._read_what_is_there() or self._death()

    def kill(self) -> None:
        """See `Worker.kill`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """See `Worker.close`."""
        self.kill()
        self._process.wait()
        while wait(self.sources, 0):
            self._read_what_is_there()
        for pipe in (self._process.stdin, *self._outputs, self._reports):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._outputs.clear()
        self._reports = None

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which is seen soon enough
            assert self._process.stdin is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _death(self) -> Failure | None:
        """Return the failure of a process that has ended without a report, once all that it wrote has been read."""
        exitcode = self._process.poll()
        if exitcode is None or self.finished:
            return None
        self.kill()  # a loader's workers would hold the pipes open
        if self._reports is not None:
            return None
        return died(self.rank, exitcode, self._last_words)

    def _read_what_is_there(self) -> Failure | None:
        failure = None
        for source in wait(self.sources, 0):
            if source is self._reports:
                failure = self._read_report()
            else:
                self._read_output(source)
        return failure

    def _read_report(self) -> Failure | None:
        assert self._reports is not None
        try:
            kind, content = pickle.loads(self._reports.recv_bytes())
        except (EOFError, OSError):
            self._reports.close()
            self._reports = None
            return None
        self.ready = self.ready or kind == "ready"
        self.finished = self.finished or kind == "finished"
        return content if kind == "failed" else None

    def _read_output(self, source: Any) -> None:
        data = os.read(source.fileno(), 1 << 16)
        if data:
            self._show(source, data)
            return
        self._show(source, b"\n" if self._lines[source] else b"")
        del self._outputs[source]
        source.close()

    def _show(self, source: Any, data: bytes) -> None:
        *lines, self._lines[source] = (self._lines[source] + data).split(b"\n")
        text = "".join(f"[rank {self.rank}] {line.decode(errors='replace')}\n" for line in lines)
        if source is self._process.stderr:
            self._last_words = (self._last_words + text)[-_LAST_WORDS:]
        with contextlib.suppress(OSError, ValueError):  # the caller's own stream is closed
            self._outputs[source].write(text)
            self._outputs[source].flush()


def started(starts: Sequence[Start]) -> list[WorkerProcess]:
    """Return a new process for each; if one cannot be started, end the others and raise a `NanoWorkerError`."""
    workers: list[WorkerProcess] = []
    with contextlib.ExitStack() as stack:
        for start in starts:
            workers.append(_started(start))
            stack.callback(workers[-1].close)
        stack.pop_all()
    return workers


def _started(start: Start) -> WorkerProcess:
    try:
        return WorkerProcess(start)
    except OSError as error:
        given = f"rank {start.rank} could not be started with {sys.executable!r} ({error})"
        needed = "every rank but the first is a Python process that nano_loop starts"
        advice = "Point sys.executable to a Python that has nano_loop"
        raise NanoWorkerError(problem(given, needed, advice), rank=start.rank) from error


def _popen(start: Start, report: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if start.verbose else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=start.environ,
        pass_fds=(report,),
        start_new_session=True,  # Ctrl-C is for rank 0
    )
