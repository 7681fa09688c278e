"""A run of which the caller is no rank: all of its processes are forked beside it, and thrown away with what they did.

The caller asks them for steps. What they write is in private folders, and what they change is in their memory alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nano_loop.cpu import Machine
from nano_loop.distributed.files.folder import place_of, workers_files
from nano_loop.distributed.launch.assignment import Assignment, State
from nano_loop.distributed.launch.failure import Failure, first
from nano_loop.distributed.launch.local.kept_server import keep, server_for
from nano_loop.distributed.launch.local.launcher import PAYLOAD, seats_of
from nano_loop.distributed.launch.local.process import WorkerProcess, forked
from nano_loop.distributed.launch.local.server import Server
from nano_loop.distributed.launch.local.start import Start
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.task import Task
from nano_loop.distributed.payload.payload import dump
from nano_loop.distributed.seat import Seat, shares_of
from nano_loop.options import Options

_ASKED, _SAID = "asked", "said"
_INTERVAL = 0.2  # seconds between two looks at the processes


class TrialFailedError(Exception):
    """A process of a run that is thrown away has ended, or has not answered in time."""


class Throwaway:
    """The processes of one such run, until `end`.

    Parameters
    ----------
    server : Server
        Forks them.
    task : Task
        What each of them does. It answers by a `Line`.
    options : Options
        The options of the run, which say how many processes it has.
    machine : Machine
        What they may use together.
    """

    def __init__(self, server: Server, task: Task, options: Options, machine: Machine) -> None:
        self._ending = contextlib.ExitStack()
        self._processes: list[WorkerProcess] = []
        self._heard: list[bytes] = []
        try:
            self._begin(server, task, options, machine)
        except BaseException:
            self.end()
            raise

    def ask(self, count: int) -> None:
        """Ask all processes for so many steps."""
        for each in self._asking:
            os.write(each, f"{count}\n".encode())

    def answers(self, timeout: float) -> list[dict[str, Any]]:
        """Return what each process has answered.

        Raises
        ------
        TrialFailedError
            If a process has ended, or the time is over.
        """
        deadline = time.monotonic() + timeout
        while not all(b"\n" in each for each in self._heard):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TrialFailedError(f"it took more than {timeout:.0f} s")
            sources = {*self._hearing, *(each for process in self._processes for each in process.sources)}
            wait(sources, min(left, _INTERVAL))
            self._hear()
            if not all(b"\n" in each for each in self._heard) and (failure := self._failure()):
                raise TrialFailedError(_in_words(failure))
        lines = [each.partition(b"\n") for each in self._heard]
        self._heard = [rest for _, _, rest in lines]
        return [json.loads(line) for line, _, _ in lines]

    def end(self) -> None:
        """Kill the processes, and delete what they have written."""
        self._ending.close()

    def _begin(self, server: Server, task: Task, options: Options, machine: Machine) -> None:
        folder = self._ending.enter_context(private_folder())
        self._ending.enter_context(workers_files(folder))
        for each in (folder, Path(place_of(folder))):
            server.begin(str(each))
            self._ending.callback(server.finish, str(each))
        seats = _seats(options, machine, folder)
        self.size = len(seats)
        (folder / PAYLOAD).mkdir()
        state = State.of_this_process(machine.num_threads)
        dump(Assignment(task, seats, state, options.process_group_backend), folder / PAYLOAD, task.names)
        self._asking = [self._opened(folder / f"{_ASKED}-{rank}") for rank in range(self.size)]
        self._hearing = [self._opened(folder / f"{_SAID}-{rank}") for rank in range(self.size)]
        self._heard = [b""] * self.size
        self._processes = forked(server, [Start.of_seat(seat, verbose=False) for seat in seats], quiet=True)
        for process in self._processes:
            self._ending.callback(process.close)

    def _opened(self, path: Path) -> int:
        """Return a named pipe, open at both ends so that neither side ever waits for the other to open it."""
        os.mkfifo(path, 0o600)
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._ending.callback(os.close, descriptor)
        return descriptor

    def _hear(self) -> None:
        for rank, descriptor in enumerate(self._hearing):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(descriptor, 1 << 16):
                    self._heard[rank] += data

    def _failure(self) -> Failure | None:
        failures = [failure for process in self._processes if (failure := process.poll())]
        ended = [process for process in self._processes if process.finished]
        if not failures and len(ended) == len(self._processes):
            raise TrialFailedError("it ended before it answered")
        return first(failures)


class Line:
    """The side of a process of such a run: it waits until it is asked for steps, and answers.

    Parameters
    ----------
    seat : Seat
        The process's.
    """

    def __init__(self, seat: Seat) -> None:
        folder, rank = seat.ranks.folder, seat.ranks.rank
        self._asked = os.open(f"{folder}/{_ASKED}-{rank}", os.O_RDONLY)
        self._said = os.open(f"{folder}/{_SAID}-{rank}", os.O_WRONLY)

    def wait(self) -> int:
        """Return the number of steps that are asked for, when they are."""
        text = b""
        while not text.endswith(b"\n"):
            text += os.read(self._asked, 1)
        return int(text)

    def say(self, **content: Any) -> None:
        """Answer, with what JSON can hold."""
        text = json.dumps(content).encode() + b"\n"
        while text:
            text = text[os.write(self._said, text) :]


@contextlib.contextmanager
def server_of_trials(options: Options, machine: Machine) -> Iterator[tuple[Server, Path]]:
    """Give the process that forks those of the runs, and a folder in memory for what all of them read."""
    with private_folder() as folder:
        server = server_for(_seats(options, machine, folder)[0])
        try:
            server.begin(str(folder))
            yield server, folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            server.finish(str(folder))
            keep(server)


def _seats(options: Options, machine: Machine, folder: Path) -> list[Seat]:
    count = options.num_processes or 1
    if count == 1 and options.cpu_for_each_process is None:
        (seat,) = seats_of(machine, shares_of(options, machine, range(1)), folder, options.timeout)
        seat.ranks.shares, seat.ranks.loader_cpus, seat.machine = (), (), machine  # bound to nothing, as without ranks
        return [seat]
    return seats_of(machine, shares_of(options, machine, range(count)), folder, options.timeout)


def _in_words(failure: Failure) -> str:
    words = [failure.what]
    if not failure.what.startswith("raised") and failure.traceback:
        words += failure.traceback.strip().splitlines()[-1:]
    return ": ".join(words)
