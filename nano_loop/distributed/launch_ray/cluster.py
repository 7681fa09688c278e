"""Ray Core as nano_loop uses it: the connection, the nodes, and the actors of a run. The only file that imports Ray.

Its import takes a second, so it is imported when a run begins that needs it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private.state import available_resources_per_node  # no public function has them by node
from ray.util import client
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nano_loop.distributed.launch.failure import Failure, Kind
from nano_loop.distributed.launch.reports import DUMP, Worker
from nano_loop.distributed.launch_ray.caller import changes_undone_by
from nano_loop.distributed.launch_ray.rank_connections import FORGET
from nano_loop.errors import NanoConfigError, NanoError, error_message

# For an actor that has ended: Ray tells no signal.
_ADVICE = (
    "See its standard error and Ray's logs on that node; if memory ran out there, lower the batch size or the ranks "
    "of a node (a larger cpu_for_each_process)"
)
_SHARED = (
    "Put files that all ranks read where all nodes see them under the same path, such as NFS; what rank 0 writes lies "
    "on its node"
)
_GONE = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
_INTERVAL = 0.1  # seconds between two looks for Ctrl-C
_LONGEST = 2000  # characters of what Ray says
_ANSWER = 3.0  # seconds that a rank has to say where it is
_ENDING = 10.0  # seconds that a killed process may take to end
_TOKEN, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class Node(NamedTuple):
    """A node of the cluster.

    Attributes
    ----------
    id : str
        Ray's.
    address : str
        Its IP address, by which Ray reaches it.
    cpus, free : int
        The CPUs that Ray may use there, and those that are not in use.
    """

    id: str
    address: str
    cpus: int
    free: int

    def __str__(self) -> str:
        return f"node {self.address} ({self.id[:8]})"


@contextmanager
def connected() -> Iterator[None]:
    """Connect to Ray if the caller has not, and disconnect on leaving then."""
    if client.ray.is_connected():
        got = "this process is connected through Ray Client (ray://)"
        expected = "the caller is rank 0, so it has to run on a node of the cluster"
        raise NanoConfigError(error_message(got, expected, "Start the script with `ray job submit`, or on a node"))
    with ExitStack() as stack:
        if not ray.is_initialized():
            _own_token(stack)
            with changes_undone_by(stack):
                _initialize()
            stack.callback(ray.shutdown)
        yield


def _initialize() -> None:
    try:
        ray.init(log_to_driver=True)
    except BaseException:  # also Ctrl-C, on the way
        ray.shutdown()
        raise


def _own_token(stack: ExitStack) -> None:
    """Let a cluster that Ray starts for this run have a token in memory; by itself Ray would write one to ~/.ray."""
    if {_TOKEN, _TOKEN_FILE} & os.environ.keys() or (Path.home() / ".ray" / "auth_token").exists():
        return
    stack.callback(_forget_token)
    with changes_undone_by(stack):
        os.environ[_TOKEN] = secrets.token_hex(32)


def _forget_token() -> None:
    """Let the next `ray.init` look for a token again; Ray remembers this one in C++, and has no public name for it."""
    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)  # from 2.52 on
    if loader is not None:
        loader.instance().reset_cache()


def nodes() -> list[Node]:
    """Return the nodes that are alive and have CPUs, the caller's first."""
    free = available_resources_per_node()
    alive = {row["NodeID"]: row for row in ray.nodes() if row["Alive"]}
    cpus = {node: int(row["Resources"].get("CPU", 0)) for node, row in alive.items()}
    listed = [
        Node(node, row["NodeManagerAddress"], cpus[node], int(free.get(node, {}).get("CPU", 0)))
        for node, row in alive.items()
    ]
    callers = ray.get_runtime_context().get_node_id()
    return sorted(listed, key=lambda node: node.id != callers)


def working_folder_is_shipped() -> bool:
    """Whether Ray has copied the caller's working folder to the nodes, in which actors run then."""
    return "working_dir" in (ray.get_runtime_context().runtime_env or {})


class Placement:
    """CPUs that are reserved for `count` ranks, as many for each, the first on the caller's node.

    Parameters
    ----------
    on_cluster : sequence of Node
        The nodes, the caller's first.
    count, cpus : int
        How many ranks, and the CPUs of each.

    Attributes
    ----------
    nodes : list of Node
        By rank, those of one node beside each other, once they are reserved.
    """

    def __init__(self, on_cluster: Sequence[Node], count: int, cpus: int) -> None:
        self.nodes: list[Node] = []
        self.cpus = cpus
        self._on_cluster = {node.id: node for node in on_cluster}
        self._bundles: list[int] = []  # by rank
        here: dict[str, str] = {"ray.io/node-id": on_cluster[0].id}
        selectors = [here, *[{} for _ in range(count - 1)]]
        self._group = placement_group([{"CPU": cpus}] * count, strategy="PACK", bundle_label_selector=selectors)

    def is_reserved(self) -> bool:
        """Return whether it is, after a short wait."""
        if not self._group.wait(timeout_seconds=_INTERVAL):
            return False
        ids, order = placement_group_table(self._group)["bundles_to_node_id"], [*self._on_cluster]
        # The bundle on the caller's node comes first, and has no actor.
        self._bundles = sorted(range(len(ids)), key=lambda bundle: (order.index(ids[bundle]), bundle))
        self.nodes = [self._on_cluster[ids[bundle]] for bundle in self._bundles]
        return True

    def actor(self, rank: int) -> Actor:
        """Start the actor of a rank."""
        bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])
        return Actor(rank, self.nodes[rank], num_cpus=self.cpus, scheduling_strategy=bundle)

    def share(self, rank: int) -> tuple[int, int] | None:
        """Return the CPUs of a rank, and those of its node; None where the ranks of the run hold the whole host."""
        node = self.nodes[rank]
        held = Counter(other.id for other in self.nodes)[node.id] * self.cpus
        # Nodes of one host, as in a test, do not know of each other.
        alone = all(other.id == node.id or other.address != node.address for other in nodes())
        return None if alone and held + self.cpus > node.cpus else (self.cpus, node.cpus)

    def remove(self) -> None:
        """Give the CPUs back."""
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(self._group)


class Actor(Worker):
    """A process that Ray has started for a rank, as a `Worker`.

    Parameters
    ----------
    rank : int
        Its rank.
    node : Node
        Where it is.
    **placed : Any
        Ray's options, which say where it starts.
    """

    patience = 0.7

    def __init__(self, rank: int, node: Node, **placed: Any) -> None:
        super().__init__(rank)
        self.node = node
        self._connection: socket.socket | None = None
        self._handle = _actor_class().options(max_restarts=0, **placed).remote(f"rank {rank}")
        self._running: Any = None

    def begin(self, setting: dict[str, Any]) -> Any:
        """Have the process prepare itself, and return the reference of what it says of itself."""
        return self._handle.begin.remote(setting)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of its `RankWorker`, and return the reference of the result."""
        return self._handle.call.remote(name, *args)

    def connect(self, connection: socket.socket) -> None:
        """Take rank 0's end of its connection, which `close` closes."""
        self._connection, self.reports = connection, connection.fileno()

    def run(self, *args: Any) -> None:
        """Have the actor read the payload and do the task."""
        self._running = self.call("run", *args)

    def forget_payload(self) -> None:
        """Have it delete its node's copy of the payload."""
        self._ask(FORGET)

    def result(self, reference: Any) -> Any:
        """Return the result of a call that has ended; if the actor has ended, its `Failure`.

        Raises
        ------
        NanoError
            If it does not find nano_loop or what it needs.
        """
        try:
            return ray.get(reference)
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
                raise NanoError(error_message(got, expected, hint)) from None
            return self._died(f"failed ({type(cause).__name__}: {str(cause)[:500]})")

    def has_ended(self) -> bool:
        """See `Worker.has_ended`."""
        return self._running is not None and bool(ray.wait([self._running], timeout=0)[0])

    def death(self) -> Failure:
        """See `Worker.death`."""
        failure = self.result(self._running)
        return failure if isinstance(failure, Failure) else self.silence()

    def silence(self) -> Failure:
        """See `Worker.silence`; Ray says nothing yet."""
        return self._died("is gone: its process or its node has ended")

    def reported(self, failure: Failure) -> Failure:
        """Add the node to the message, and advice if a file was not found."""
        if failure.kind not in (Kind.LATE, Kind.LEFT):
            failure.what = f"on {self.node} {failure.what}"
        if "raised FileNotFoundError" in failure.what:
            failure.advice = _SHARED
        return failure

    def stack_dump(self) -> str:
        """See `Worker.stack_dump`."""
        self.stacks.clear()
        self._ask(DUMP)
        deadline = time.monotonic() + _ANSWER
        while not self.stacks and self.sources and time.monotonic() < deadline:
            self.read_reports()  # the thread that watches may be this one
            time.sleep(0.02)
        return self.stacks[0] if self.stacks else ""

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended, or Ray has been shut down
            ray.kill(self._handle, no_restart=True)

    def close(self) -> None:
        """See `Worker.close`."""
        self.kill()
        deadline = time.monotonic() + _ENDING
        while self.reports is not None and time.monotonic() < deadline:
            self.read_reports()
            time.sleep(0.01)
        self.reports = self._running = None
        if self._connection is not None:
            self._connection.close()

    def _ask(self, request: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.send(request)

    def _died(self, what: str, traceback: str | None = None) -> Failure:
        """Return the failure of an actor that has reported none itself."""
        return Failure(self.rank, Kind.CAUSE, f"on {self.node} {what}", _ADVICE, traceback=traceback)


def put(content: Any) -> Any:
    """Put an array where all nodes can read it, as long as the reference lives."""
    return ray.put(content)


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
