"""Ray Core as nano_loop uses it: the connection, the nodes, and the actors of a run. The only file that imports Ray.

Its import takes a second, so it is imported when a run begins that needs it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private.state import available_resources_per_node  # no public function has them by node
from ray.util import client
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nano_loop.distributed.launch.ray.undoing import changes_undone_by
from nano_loop.errors import NanoConfigError, problem

#: What Ray raises where an actor, its node or its code fails.
RayError = ray.exceptions.RayError
#: Of these, what means that the process of an actor is gone.
Gone = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)

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


@contextmanager
def connected() -> Iterator[None]:
    """Connect to Ray if the caller has not, and disconnect on leaving then."""
    if client.ray.is_connected():
        given = "this process is connected through Ray Client (ray://)"
        needed = "the caller is rank 0, so it has to run on a node of the cluster"
        raise NanoConfigError(problem(given, needed, "Start the script with `ray job submit`, or on a node"))
    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
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
    mine = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            each["NodeID"],
            each["NodeManagerAddress"],
            int(each["Resources"].get("CPU", 0)),
            int(free.get(each["NodeID"], {}).get("CPU", 0)),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]
    return sorted(found, key=lambda node: node.id != mine)


def working_folder_is_shipped() -> bool:
    """Whether Ray has copied the caller's working folder to the nodes, in which actors run then."""
    return "working_dir" in (ray.get_runtime_context().runtime_env or {})


class Placement:
    """A placement group with `each` CPUs for each of `count` ranks, the first on the caller's node.

    Parameters
    ----------
    node : Node
        The caller's.
    count, each : int
        How many ranks, and the CPUs of each.
    """

    def __init__(self, node: Node, count: int, each: int) -> None:
        here: dict[str, str] = {"ray.io/node-id": node.id}
        selectors = [here, *[{} for _ in range(count - 1)]]
        self._group = placement_group([{"CPU": each}] * count, strategy="PACK", bundle_label_selector=selectors)

    def wait(self, seconds: float) -> bool:
        """Return whether it is reserved, after this time at the latest."""
        return bool(self._group.wait(timeout_seconds=seconds))

    def nodes(self) -> list[str]:
        """Return the ids of the bundles' nodes."""
        found = placement_group_table(self._group)["bundles_to_node_id"]
        return [found[bundle] for bundle in range(len(found))]

    def actor(self, bundle: int, cpus: int, name: str) -> Actor:
        """Return a new actor in a bundle; `name` is before each line that it writes."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        made = _actor_class().options(num_cpus=cpus, max_restarts=0, scheduling_strategy=strategy)
        return Actor(made.remote(name))

    def remove(self) -> None:
        """Give the CPUs back."""
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


class Actor:
    """A process that Ray has started for a rank.

    Parameters
    ----------
    handle : ray.actor.ActorHandle
        Ray's.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def begin(self, setting: dict[str, Any]) -> Any:
        """Have the process prepare itself, and return the reference of what it says of itself."""
        return self._handle.begin.remote(setting)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of its `RankWorker`, and return the reference of the result."""
        return self._handle.call.remote(name, *args)

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(RayError, ValueError):  # it has ended, or Ray has been shut down
            ray.kill(self._handle, no_restart=True)


def put(content: Any) -> Any:
    """Put an array where all nodes can read it, until the reference is gone."""
    return ray.put(content)


def completed(references: Sequence[Any], seconds: float) -> list[Any]:
    """Return those of the references whose results are there, after this time at the latest."""
    done, _ = ray.wait([*references], num_returns=len(references), timeout=seconds, fetch_local=True)
    return list(done)


def result(reference: Any) -> Any:
    """Return the result of a reference that is completed; raise what has ended its actor."""
    return ray.get(reference)


def cause_of(error: BaseException) -> BaseException:
    """Return what an actor has raised, without what Ray wraps it in."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, BaseException) else error


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
            import importlib
            import os
            import sys

            for name in [name for name in os.environ if name.startswith(setting["without"])]:
                del os.environ[name]
            os.environ.update(setting["environ"])
            sys.path.extend(each for each in setting["path"] if each not in sys.path and os.path.exists(each))
            worker = importlib.import_module(setting["worker"])
            self._worker = worker.RankWorker(setting)
            return self._worker.place()

        def call(self, name: str, *args: Any) -> Any:
            return getattr(self._worker, name)(*args)

    return ray.remote(Rank)
