"""The actor of a rank: the process that Ray has started for it, as rank 0 sees it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from nano_loop.distributed.launch.failure import Failure, Kind
from nano_loop.distributed.launch.local.frames import Frames, read_available
from nano_loop.distributed.launch.local.output import Output
from nano_loop.distributed.launch.local.worker_warnings import Awaiting
from nano_loop.distributed.launch.ray.cluster import Node
from nano_loop.distributed.launch.ray.rank_connections import ask
from nano_loop.errors import NanoError, problem

# For an actor that has ended: Ray tells no signal.
_ADVICE = (
    "See its standard error and Ray's logs on that node; if memory ran out there, lower the batch size or the ranks "
    "of a node (a larger cpu_for_each_process)"
)
_GONE = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
_INTERVAL = 0.1  # seconds between two looks for Ctrl-C
_LONGEST = 2000  # characters of what Ray says
_SILENCE = 0.7  # seconds from the end of a connection to the news of what has ended it; an echo waits longer
_ANSWER = 1.0  # seconds that a rank has to say where it is
_ENDING = 10.0  # seconds that a killed process may take to end


class Actor:
    """A process that Ray has started for a rank; a `Worker` once it is connected and runs the task.

    Parameters
    ----------
    rank : int
        Its rank.
    node : Node
        Where it is.
    **placed : Any
        Ray's options, which say where it starts.
    """

    def __init__(self, rank: int, node: Node, **placed: Any) -> None:
        self.rank, self.node = rank, node
        self.ready, self.finished = True, False  # an actor that has not read its payload is no worker yet
        #: Rank 0's end of its connection, once there is one.
        self.connection: socket.socket | None = None
        self._handle = _actor_class().options(max_restarts=0, **placed).remote(f"rank {rank}")
        self._running: Any = None
        self._frames = Frames()
        self._warnings = Awaiting()
        self._silent_since: float | None = None
        self._failure: Failure | None = None
        self._answers: list[str] = []
        self._reading = threading.Lock()

    def begin(self, setting: dict[str, Any]) -> Any:
        """Have the process prepare itself, and return the reference of what it says of itself."""
        return self._handle.begin.remote(setting)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of its `RankWorker`, and return the reference of the result."""
        return self._handle.call.remote(name, *args)

    def run(self, *args: Any) -> None:
        """Have the actor run the task, before it is watched as a `Worker`."""
        self._running = self.call("run", *args)

    def result(self, reference: Any) -> Any:
        """Return the result of a call that has ended; if the actor has failed, its `Failure`.

        Raises
        ------
        NanoError
            If it does not find nano_loop or what it needs.
        """
        try:
            result = ray.get(reference)
        except _GONE as error:
            reason = " ".join(str(error).split())
            with contextlib.suppress(ValueError):  # Ray's text goes on with ids and hints for its own developers
                reason = reason[: reason.index(" class_name:")] + reason[reason.index(" The actor ") :]
            return self._died("ended its process", f"Ray says: {reason[:_LONGEST]}")
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ImportError):
                got = f"rank {self.rank} on {self.node} could not import nano_loop ({cause})"
                expected = "every node needs the same Python environment as the caller's"
                hint = "Install it there, or ship code with "
                hint += 'ray.init(runtime_env={"working_dir": ".", "py_modules": [...]})'
                raise NanoError(problem(got, expected, hint)) from None
            return self._died(f"failed ({type(cause).__name__}: {str(cause)[:500]})")
        if isinstance(result, Failure) and result.kind is not Kind.LEFT and result.late is None:
            result.what = f"on {self.node} {result.what}"
        return result

    @property
    def sources(self) -> Sequence[Any]:
        """See `Worker.sources`."""
        return [self._socket.fileno()] if self._silent_since is None else []

    def poll(self) -> Failure | None:
        """See `Worker.poll`."""
        self._read()
        if self._failure is None and not self.finished:
            self._failure = self._outcome()
        return self._failure

    def stack_dump(self) -> str:
        """See `Worker.stack_dump`."""
        self._answers.clear()
        ask(self._socket)
        deadline = time.monotonic() + _ANSWER
        while not self._answers and self.sources and time.monotonic() < deadline:
            self._read()  # the thread that watches may be this one
            time.sleep(0.02)
        return self._answers[0] if self._answers else ""

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended, or Ray has been shut down
            ray.kill(self._handle, no_restart=True)

    def close(self) -> None:
        """See `Worker.close`."""
        self.kill()
        deadline = time.monotonic() + _ENDING
        while self._silent_since is None and time.monotonic() < deadline:
            self._read()
            time.sleep(0.01)
        self._warnings.show(Output(-1, sys.stderr, f"[rank {self.rank}] ").say)
        self._socket.close()
        self._running = None

    @property
    def _socket(self) -> socket.socket:
        assert self.connection is not None
        return self.connection

    def _died(self, what: str, traceback: str | None = None) -> Failure:
        """Return the failure of the actor, of which it has said nothing itself."""
        return Failure(self.rank, Kind.CAUSE, f"on {self.node} {what}", _ADVICE, traceback=traceback)

    def _outcome(self) -> Failure | None:
        """Return how the task has failed, if it has; note that it has returned."""
        if self._running is not None and ray.wait([self._running], timeout=0)[0]:
            failure: Failure | None = self.result(self._running)
            self.finished = failure is None
            return failure
        if self._silent_since is None or time.monotonic() < self._silent_since + _SILENCE:
            return None
        return self._died("is gone: its process or its node has ended")  # and Ray says nothing yet

    def _read(self) -> None:
        with self._reading:
            if self._silent_since is not None:
                return
            try:
                data, ended = read_available(self._socket.fileno())
            except OSError:  # the kernel has given the other host up
                data, ended = b"", True
            for header, content in self._frames.feed(data):
                if header["kind"] == "warning":
                    self._warnings.take(header)
                elif header["kind"] == "whereabouts":
                    self._answers.append(content.decode(errors="replace"))
            if ended:
                self._silent_since = time.monotonic()


def results(calls: Mapping[Actor, Any], check: Callable[[], None]) -> dict[Actor, Any]:
    """Wait for calls of actors, and return their results.

    Parameters
    ----------
    calls : mapping of Actor to reference
        What `Actor.call` has returned.
    check : callable
        Raises where the user has interrupted the run.

    Raises
    ------
    NanoError
        See `Actor.result`.
    NanoWorkerError
        If an actor ends, or a call fails.
    """
    waiting, done = dict(calls), {}
    while waiting:
        check()
        ended, _ = ray.wait([*waiting.values()], num_returns=len(waiting), timeout=_INTERVAL)
        for actor in [actor for actor, call in waiting.items() if call in ended]:
            done[actor] = actor.result(waiting.pop(actor))
            if isinstance(done[actor], Failure):
                raise done[actor].as_error()
    return done


def _actor_class() -> Any:
    """Make the class of the actors.

    Cloudpickle sends a class that a function has made by value, so that nothing of nano_loop, and so no torch, is
    imported in the process before its environment is set.
    """

    class Rank:
        def __init__(self, name: str) -> None:
            self._name = name
            self._worker: Any = None

        def __repr__(self) -> str:  # Ray puts it before each line that the process writes
            return self._name

        def begin(self, setting: dict[str, Any]) -> Any:
            import os
            import pickle
            import sys

            for name in [name for name in os.environ if name.startswith(setting["without"])]:
                del os.environ[name]
            os.environ.update(setting["environ"])
            sys.path.extend(entry for entry in setting["path"] if entry not in sys.path and os.path.exists(entry))
            self._worker = pickle.loads(setting["worker"])(setting)  # the class, by its name
            return self._worker.place()

        def call(self, name: str, *args: Any) -> Any:
            return getattr(self._worker, name)(*args)

    return ray.remote(Rank)
