"""Ray Core as nano_loop uses it: the connection, the nodes, and the actors of a run. The only file that imports Ray.

Its import takes a second, so it is imported when a run begins that needs it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private.state import available_resources_per_node  # no public function has them by node
from ray.util import client
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nano_loop.distributed.launch.failure import Failure, Kind
from nano_loop.distributed.launch.ray.caller import changes_undone_by
from nano_loop.errors import NanoConfigError, NanoError, problem

#: For an actor that has ended: Ray tells no signal.
ADVICE = (
    "See its standard error and Ray's logs on that node; if memory ran out there, lower the batch size or the ranks "
    "of a node (a larger cpu_for_each_process)"
)
_GONE = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
_TOKEN, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_INTERVAL = 0.1  # seconds between two looks for Ctrl-C
_LONGEST = 2000  # characters of what Ray says


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
        given = "this process is connected through Ray Client (ray://)"
        needed = "the caller is rank 0, so it has to run on a node of the cluster"
        raise NanoConfigError(problem(given, needed, "Start the script with `ray job submit`, or on a node"))
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
    """A placement group with the same number of CPUs for each of `count` ranks, the first on the caller's node.

    Parameters
    ----------
    node : Node
        The caller's.
    count, cpus : int
        How many ranks, and the CPUs of each.
    """

    def __init__(self, node: Node, count: int, cpus: int) -> None:
        here: dict[str, str] = {"ray.io/node-id": node.id}
        selectors = [here, *[{} for _ in range(count - 1)]]
        self._group = placement_group([{"CPU": cpus}] * count, strategy="PACK", bundle_label_selector=selectors)

    def wait(self, seconds: float) -> bool:
        """Return whether it is reserved, after this time at the latest."""
        return bool(self._group.wait(timeout_seconds=seconds))

    def nodes(self) -> list[str]:
        """Return the ids of the bundles' nodes."""
        ids = placement_group_table(self._group)["bundles_to_node_id"]
        return [ids[bundle] for bundle in range(len(ids))]

    def actor(self, bundle: int, cpus: int, rank: int, node: Node) -> Actor:
        """Start the actor of a rank in a bundle, which is on a node."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        kind = _actor_class().options(num_cpus=cpus, max_restarts=0, scheduling_strategy=strategy)
        return Actor(kind.remote(f"rank {rank}"), rank, node)

    def remove(self) -> None:
        """Give the CPUs back."""
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(self._group)


class Actor:
    """A process that Ray has started for a rank.

    Parameters
    ----------
    handle : ray.actor.ActorHandle
        Ray's.
    rank : int
        Its rank.
    node : Node
        Where it is.
    """

    def __init__(self, handle: Any, rank: int, node: Node) -> None:
        self._handle = handle
        self.rank = rank
        self.node = node

    def begin(self, *args: Any) -> Any:
        """Have the process prepare itself, and return the reference of what it says of itself."""
        return self._handle.begin.remote(*args)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of its `RankWorker`, and return the reference of the result."""
        return self._handle.call.remote(name, *args)

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
            return self.failure("ended its process", f"Ray says: {reason[:_LONGEST]}")
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ImportError):
                given = f"rank {self.rank} on {self.node} could not import nano_loop ({cause})"
                needed = "every node needs the same Python environment as the caller's"
                advice = "Install it there, or ship code with "
                advice += 'ray.init(runtime_env={"working_dir": ".", "py_modules": [...]})'
                raise NanoError(problem(given, needed, advice)) from None
            return self.failure(f"failed ({type(cause).__name__}: {str(cause)[:500]})")
        if isinstance(result, Failure) and result.kind is not Kind.LEFT and result.late is None:
            result.what = f"on {self.node} {result.what}"
        return result

    def failure(self, what: str, traceback: str | None = None) -> Failure:
        """Return the failure of the actor, of which it has said nothing itself."""
        return Failure(self.rank, Kind.CAUSE, f"on {self.node} {what}", ADVICE, traceback=traceback)

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended, or Ray has been shut down
            ray.kill(self._handle, no_restart=True)


def put(content: Any) -> Any:
    """Put an array where all nodes can read it, until the reference is gone."""
    return ray.put(content)


def has_ended(reference: Any) -> bool:
    """Return whether a call has ended."""
    return bool(ray.wait([reference], timeout=0)[0])


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
