"""One worker process as rank 0 has it: how it is started, what it writes, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from nano_loop.distributed.launch.failure import Failure, died
from nano_loop.errors import NanoWorkerError, problem

# Runs before torch is imported, and so before a thread exists that would keep another mask. Nothing of what imports
# make is garbage: to look for it takes a fifth of the start. Of the working folder, which -c puts first on the path, a
# json.py would be taken for Python's own. torch 2.8 makes a temporary folder when it is imported, which a killed worker
# would leave behind: in the run's own folder it goes with that.
_BOOTSTRAP = """
import sys
sys.path[:] = filter(None, sys.path)
import gc, json, os, pathlib, tempfile
gc.disable()
start = json.loads(sys.stdin.buffer.readline())
if start["cpus"]:
    os.sched_setaffinity(0, start["cpus"])
sys.path[:], sys.argv[:] = start["path"], start["argv"]
tempfile.tempdir = start["folder"]
from nano_loop.distributed.launch.worker import main
tempfile.tempdir = None
main(pathlib.Path(start["folder"]), start["rank"], start["report"])
"""
_LAST_WORDS = 4000  # characters of standard error that are kept for a message
_FLAGS = (
    ("optimize", "-O"),  # else an assert would fail on one rank alone
    ("isolated", "-I"),
    ("ignore_environment", "-E"),
    ("no_user_site", "-s"),
    ("no_site", "-S"),
    ("dont_write_bytecode", "-B"),
    ("bytes_warning", "-b"),
)


@dataclass
class Start:
    """What it takes to start a worker.

    Parameters
    ----------
    rank : int
        Its rank.
    cpus : list of int
        The logical CPUs that it is bound to; empty for no binding.
    folder : str
        The folder that the ranks of the run have in common.
    path, argv : list of str
        ``sys.path`` and ``sys.argv`` of the caller.
    environ : dict
        Its environment.
    verbose : bool
        Whether what it prints is shown.
    """

    rank: int
    cpus: list[int]
    folder: str
    path: list[str]
    argv: list[str]
    environ: dict[str, str]
    verbose: bool

    def as_line(self, report: int) -> bytes:
        """Return what the new process reads, with the file descriptor to which it reports."""
        told = ("rank", "cpus", "folder", "path", "argv")
        return json.dumps({name: getattr(self, name) for name in told} | {"report": report}).encode() + b"\n"


class Worker:
    """One worker process, with the pipes to and from it."""

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.ready = self.finished = False
        self.last_words = ""
        reading, writing = os.pipe()
        self.reports: Connection[Any, Any] | None = Connection(reading, writable=False)
        try:
            self.process = subprocess.Popen(
                [sys.executable, *_own_options(), "-c", _BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if start.verbose else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=start.environ,
                pass_fds=(writing,),
                start_new_session=True,  # Ctrl-C is for rank 0
            )
        except BaseException:
            self.reports.close()
            raise
        finally:
            os.close(writing)
        self._outputs = {
            stream: getattr(sys, name)
            for name, stream in (("stderr", self.process.stderr), ("stdout", self.process.stdout))
            if stream is not None
        }
        self._lines = dict.fromkeys(self._outputs, b"")
        self._tell(start.as_line(writing))

    def go(self) -> None:
        """Tell it that its payload is there."""
        self._tell(b"\n")

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which is seen soon enough
            assert self.process.stdin is not None
            self.process.stdin.write(line)
            self.process.stdin.flush()

    @property
    def sources(self) -> list[Any]:
        """What it may write to."""
        return [*self._outputs, *([self.reports] if self.reports else [])]

    def read(self, source: Any) -> Failure | None:
        """Take in what is waiting in one of `sources`."""
        if source is self.reports:
            return self._read_report()
        data = os.read(source.fileno(), 1 << 16)
        if not data:
            self._show(source, b"\n" if self._lines[source] else b"")
            del self._outputs[source]
            source.close()
        else:
            self._show(source, data)
        return None

    def kill(self) -> None:
        """Kill the process with all that it has started, also when it has ended by itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, reap it, and close the pipes."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, *self._outputs, self.reports):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._outputs.clear()
        self.reports = None

    def _read_report(self) -> Failure | None:
        assert self.reports is not None
        try:
            kind, content = pickle.loads(self.reports.recv_bytes())
        except (EOFError, OSError):
            self.reports.close()
            self.reports = None
            return None
        self.ready = self.ready or kind == "ready"
        self.finished = self.finished or kind == "finished"
        return content if kind == "failed" else None

    def _show(self, source: Any, data: bytes) -> None:
        *lines, self._lines[source] = (self._lines[source] + data).split(b"\n")
        text = "".join(f"[rank {self.rank}] {line.decode(errors='replace')}\n" for line in lines)
        if source is self.process.stderr:
            self.last_words = (self.last_words + text)[-_LAST_WORDS:]
        with contextlib.suppress(OSError, ValueError):  # the caller's own stream is closed
            self._outputs[source].write(text)
            self._outputs[source].flush()


def started(start: Start) -> Worker:
    """Return a new worker; where its process cannot be started, raise a `NanoWorkerError`."""
    try:
        return Worker(start)
    except OSError as error:
        given = f"rank {start.rank} could not be started with {sys.executable!r} ({error})"
        needed = "each rank but the first is a Python process of its own"
        raise NanoWorkerError(
            problem(given, needed, "Let sys.executable be a Python that has nano_loop"), rank=start.rank
        ) from error


def death_of(worker: Worker) -> Failure | None:
    """Return the failure of a worker that has ended without saying why, once all that it wrote has been read."""
    exitcode = worker.process.poll()
    if exitcode is None or worker.finished:
        return None
    worker.kill()  # a loader's workers would hold the pipes open
    if worker.reports is not None:
        return None
    return died(worker.rank, exitcode, worker.last_words)


def _own_options() -> list[str]:
    """Return the options of Python itself that this process was started with, for a worker to have the same."""
    flags = [option for name, option in _FLAGS for _ in range(getattr(sys.flags, name))]
    settings = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    return [*flags, *settings, *(f"-W{each}" for each in sys.warnoptions)]
