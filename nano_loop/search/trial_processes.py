"""The processes of a trial, of which the caller is no rank: forked beside it, and thrown away with what they did.

The caller asks them for steps. What they write is in private folders, and what they change is in their memory alone.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.distributed.comm.rank_slot import RankSlot, shares_of
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.files.folder import place_of, workers_files
from nano_loop.distributed.files.made_folders import MadeFolders
from nano_loop.distributed.launch.assignment import Assignment, State, write_payload
from nano_loop.distributed.launch.failure import Failure, Kind, first
from nano_loop.distributed.launch.reports import Frames, framed, read_available
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.task import Task
from nano_loop.distributed.launch_local.launcher import serving, slots_of
from nano_loop.distributed.launch_local.process import WorkerProcess, forked
from nano_loop.distributed.launch_local.server import Server
from nano_loop.runtime.settings import Settings

_REQUESTS, _ANSWERS = "requests", "answers"
_INTERVAL = 0.2  # seconds between two looks at the processes
#: A step that takes so many times the median is no step alone: an evaluation, or a checkpoint.
_BETWEEN_EPOCHS = 20.0


class TrialFailedError(Exception):
    """A process of a trial has ended, or has not answered in time.

    Parameters
    ----------
    message : str
        What has happened.
    failure : Failure, optional
        That of the process, if it has ended.
    """

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class TrialProcesses:
    """The processes of one trial, until `close`. They begin with their first steps at once.

    Parameters
    ----------
    server : Server
        Forks them.
    task : Task
        What each of them does. It answers by a `Line`.
    modules : sequence of str
        What it imports besides, to read more.
    settings : Settings
        The options of the trial, which say how many processes it has, and the machine.
    """

    def __init__(self, server: Server, task: Task, modules: Sequence[str], settings: Settings) -> None:
        self._ending = contextlib.ExitStack()
        self._processes: list[WorkerProcess] = []
        self._frames: list[tuple[Frames, list[dict[str, Any]]]] = []  # of each process, with its answers
        try:
            self._begin(server, task, modules, settings.options, settings.machine)
        except BaseException:
            self.close()
            raise

    def take(self, count: int, timeout: float) -> tuple[float, int]:
        """Take steps; return the seconds of one for one batch, and the memory of the processes in bytes.

        Several processes take as many batches. Of the steps it is the mean: with workers of a loader batches come in
        bursts, where a median would mislead.
        """
        for descriptor in self._requests:
            os.write(descriptor, f"{count}\n".encode())
        answers = self.answers(timeout)
        slowest = max(mean_without_pauses(answer["seconds"]) for answer in answers)
        return slowest / len(answers), sum(answer["peak"] for answer in answers)

    def answers(self, timeout: float) -> list[dict[str, Any]]:
        """Return what each process has answered.

        Raises
        ------
        TrialFailedError
            If a process has ended, or the time is over.
        """
        deadline = time.monotonic() + timeout
        while not self._have_all_answered():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TrialFailedError(f"it took more than {timeout:.0f} s")
            sources = {*self._answers, *(source for process in self._processes for source in process.sources)}
            wait(sources, min(left, _INTERVAL))
            if not self._have_all_answered() and (failure := self._failure()):
                raise TrialFailedError(_in_words(failure), failure)
        return [answers.pop(0) for _, answers in self._frames]

    def close(self) -> None:
        """Kill the processes, and delete what they have written."""
        self._ending.close()

    def _begin(self, server: Server, task: Task, modules: Sequence[str], options: Options, machine: Machine) -> None:
        folder = self._ending.enter_context(private_folder())
        self._ending.enter_context(workers_files(folder))
        self._ending.callback(MadeFolders(folder).clean, removed_only=False)
        for place in (folder, Path(place_of(folder))):
            server.begin(str(place))
            self._ending.callback(server.finish, str(place))
        slots = _slots(options, machine, folder)
        state = State.of_this_process(machine.num_threads)
        written = write_payload(Assignment(task, state, options, slots), folder, task.names)
        self._requests = [self._opened(folder / f"{_REQUESTS}-{rank}") for rank in range(len(slots))]
        self._answers = [self._opened(folder / f"{_ANSWERS}-{rank}") for rank in range(len(slots))]
        self._frames = [(Frames(), []) for _ in slots]
        imported = [*written.modules, *modules] if written.modules else []
        self._processes = forked(server, slots, imported, quiet=True)
        for process in self._processes:
            self._ending.callback(process.close)

    def _opened(self, path: Path) -> int:
        """Return a named pipe, open at both ends so that neither side ever waits for the other to open it."""
        os.mkfifo(path, 0o600)
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._ending.callback(os.close, descriptor)
        return descriptor

    def _have_all_answered(self) -> bool:
        """Take in what has arrived, and return whether each process has answered."""
        for descriptor, (frames, answers) in zip(self._answers, self._frames, strict=True):
            data, _ = read_available(descriptor)
            answers += (answer for answer, _ in frames.feed(data))
        return all(answers for _, answers in self._frames)

    def _failure(self) -> Failure | None:
        failures = [failure for process in self._processes if (failure := process.poll())]
        ended = [process for process in self._processes if process.finished]
        if not failures and len(ended) == len(self._processes):
            raise TrialFailedError("it ended before it answered")
        return first(failures)


class Line:
    """The side of a process of a trial: it waits until it is asked for steps, and answers.

    Parameters
    ----------
    requests, answers : int
        Descriptors of pipes.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers

    @classmethod
    def of(cls, slot: RankSlot) -> Line:
        """Return that of a rank of `TrialProcesses`."""
        folder, rank = slot.ranks.folder, slot.ranks.rank
        return cls(
            os.open(f"{folder}/{_REQUESTS}-{rank}", os.O_RDONLY), os.open(f"{folder}/{_ANSWERS}-{rank}", os.O_WRONLY)
        )

    def wait(self) -> int:
        """Return the number of steps that are asked for, when they are."""
        text = b""
        while not text.endswith(b"\n"):
            text += os.read(self._requests, 1)
        return int(text)

    def answer(self, **content: Any) -> None:
        """Answer, with what JSON can hold."""
        text = framed(content)
        while text:
            text = text[os.write(self._answers, text) :]


@contextlib.contextmanager
def trial_server(settings: Settings, modules: Sequence[str]) -> Iterator[tuple[Server, Path]]:
    """Give the process, with these modules, that forks those of the trials, and a folder for what all of them read."""
    with (
        private_folder() as folder,
        serving(_slots(settings.options, settings.machine, folder)[0], modules) as server,
    ):
        yield server, folder


def _slots(options: Options, machine: Machine, folder: Path) -> list[RankSlot]:
    count = options.num_processes or 1
    if count == 1 and options.cpu_for_each_process is None:  # bound to nothing, as without ranks
        return [RankSlot(Ranks(timeout=options.timeout, folder=folder), machine, machine)]
    return slots_of(machine, shares_of(options, machine, range(count)), folder, options.timeout)


def mean_without_pauses(seconds: list[float]) -> float:
    """Return the mean of the seconds of steps, without evaluations and checkpoints between them."""
    most = _BETWEEN_EPOCHS * statistics.median(seconds)
    return statistics.fmean(step for step in seconds if step <= most)


def _in_words(failure: Failure) -> str:
    words = [failure.what]
    if failure.kind is Kind.CAUSE and not failure.what.startswith("raised") and failure.traceback:
        words += failure.traceback.strip().splitlines()[-1:]
    return ": ".join(words)
