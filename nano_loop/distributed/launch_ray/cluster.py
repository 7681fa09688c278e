"""The interface to Ray Core: the connection, the nodes, and the actors of a run. The only file that imports Ray.

It is imported when a run first needs it, because importing Ray takes a second.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray._private.state import available_resources_per_node  # no public function returns them by node
from ray.util import client
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import Store  # type: ignore[attr-defined]

from nano_loop.config.options import Options
from nano_loop.distributed.launch.failure import Failure, Kind
from nano_loop.distributed.launch.workers import Worker
from nano_loop.distributed.launch_ray.caller import changes_undone_by
from nano_loop.distributed.launch_ray.worker import ASKED, READY, STACK, RankWorker
from nano_loop.errors import NanoConfigError, NanoError, error_message

# For an actor that has ended, for which Ray does not report the signal.
_ADVICE = (
    "See its standard error and Ray's logs on that node; if memory ran out there, lower the batch size or the ranks "
    "of a node (a larger cpu_for_each_process)"
)
_SHARED = (
    "Put files that all ranks read on a path that all nodes share, such as NFS; files written by rank 0 are on its node"
)
_INSTALL = (
    "Every node needs the same Python environment as the caller's: install it there, or ship code with "
    'ray.init(runtime_env={"working_dir": ".", "py_modules": [...]})'
)
_GONE = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
_INTERVAL = 0.1  # seconds between checks for Ctrl-C
_LONGEST = 2000  # characters of Ray's message
_ANSWER = 3.0  # seconds for a rank's reply to a stack dump request
_ENDING = 10.0  # seconds for a killed process to end
_TOKEN, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class Node(NamedTuple):
    """A node of the cluster."""

    id: str  # Ray's id
    address: str  # the IP address that Ray uses
    cpus: int  # usable by Ray
    free: int  # the number of these that are not in use

    def __str__(self) -> str:
        return f"node {self.address} ({self.id[:8]})"


@contextmanager
def connected() -> Iterator[None]:
    """Connect to Ray if the caller has not, and disconnect on exit in this case."""
    if client.ray.is_connected():
        got = "this process is connected through Ray Client (ray://)"
        expected = "the caller is rank 0, so it must run on a node of the cluster"
        raise NanoConfigError(error_message(got, expected, "Start the script with `ray job submit`, or on a node"))
    with ExitStack() as stack:
        if not ray.is_initialized():
            _own_token(stack)
            stack.callback(ray.shutdown)  # also runs if Ctrl-C interrupts the connection
            with changes_undone_by(stack):
                ray.init(log_to_driver=True)
        yield


def _own_token(stack: ExitStack) -> None:
    """Make a cluster that Ray starts for this run keep its token in memory; Ray would write one to ~/.ray."""
    if {_TOKEN, _TOKEN_FILE} & os.environ.keys() or (Path.home() / ".ray" / "auth_token").exists():
        return
    stack.callback(_forget_token)
    with changes_undone_by(stack):
        os.environ[_TOKEN] = secrets.token_hex(32)


def _forget_token() -> None:
    """Make the next `ray.init` look for a token again; Ray caches it in C++, without a public way to reset it."""
    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)  # 2.52 and later
    if loader is not None:
        loader.instance().reset_cache()


def nodes() -> list[Node]:
    """Return the live nodes that have CPUs, the caller's first."""
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
    """Whether Ray has copied the caller's working folder to the nodes, as the actors' working folder."""
    return "working_dir" in (ray.get_runtime_context().runtime_env or {})


class Placement:
    """Reserved CPUs for `count` ranks, equally many for each, with the first rank on the first node, the caller's."""

    def __init__(self, on_cluster: Sequence[Node], count: int, cpus: int) -> None:
        self.nodes: list[Node] = []  # by rank, grouping the ranks of a node, once they are reserved
        self.cpus = cpus
        self._on_cluster = {node.id: node for node in on_cluster}
        self._bundles: list[int] = []  # by rank
        here: dict[str, str] = {"ray.io/node-id": on_cluster[0].id}
        selectors = [here, *[{} for _ in range(count - 1)]]
        self._group = placement_group([{"CPU": cpus}] * count, strategy="PACK", bundle_label_selector=selectors)

    def is_reserved(self) -> bool:
        """Return whether the CPUs are reserved, after a short wait."""
        if not self._group.wait(timeout_seconds=_INTERVAL):
            return False
        ids, order = placement_group_table(self._group)["bundles_to_node_id"], [*self._on_cluster]
        # The bundle on the caller's node comes first, and has no actor.
        self._bundles = sorted(range(len(ids)), key=lambda bundle: (order.index(ids[bundle]), bundle))
        self.nodes = [self._on_cluster[ids[bundle]] for bundle in self._bundles]
        return True

    def place(self, rank: int) -> dict[str, Any]:
        """Return the options that start a rank's actor on its CPUs."""
        bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])
        return {"num_cpus": self.cpus, "scheduling_strategy": bundle}

    def share(self, rank: int) -> tuple[int, int] | None:
        """Return the CPUs of a rank and of its node; None if the ranks of the run use the whole host."""
        node = self.nodes[rank]
        held = Counter(other.id for other in self.nodes)[node.id] * self.cpus
        # Several nodes on one host, as in tests, do not know of each other.
        alone = all(other.id == node.id or other.address != node.address for other in nodes())
        return None if alone and held + self.cpus > node.cpus else (self.cpus, node.cpus)

    def remove(self) -> None:
        """Release the CPUs."""
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(self._group)


@contextmanager
def reserved(options: Options, check: Callable[[], None]) -> Iterator[Placement]:
    """Reserve CPUs for all ranks, and release them on exit; raise if there are too few, or they stay in use."""
    count, on_cluster = options.processes, nodes()
    chosen = options.cpu_for_each_process
    cpus = chosen if isinstance(chosen, int) else largest(on_cluster, count)
    if cpus < 1 or not _fits([node.cpus for node in on_cluster], count, cpus):
        raise NanoConfigError(_too_few(options, count, max(cpus, 1), on_cluster))
    placement = Placement(on_cluster, count, cpus)
    try:
        deadline = time.monotonic() + options.timeout
        while not placement.is_reserved():
            check()
            if time.monotonic() > deadline:
                raise NanoError(_in_use(options, count, cpus))
        yield placement
    finally:
        placement.remove()


def largest(on_cluster: Sequence[Node], count: int) -> int:
    """Return the maximum CPUs for each of `count` ranks among free CPUs, or else among all; 0 if there are too few."""
    for room in ([node.free for node in on_cluster], [node.cpus for node in on_cluster]):
        fitting = (cpus for cpus in range(max(room), 0, -1) if _fits(room, count, cpus))
        if cpus := next(fitting, 0):
            return cpus
    return 0


def _fits(room: Sequence[int], count: int, cpus: int) -> bool:
    """Whether nodes with this many CPUs can hold `count` ranks, one of them on the first node, the caller's."""
    return room[0] >= cpus and sum(node // cpus for node in room) >= count


def _too_few(options: Options, count: int, cpus: int, on_cluster: Sequence[Node]) -> str:
    got = options.as_written["num_processes"]
    if options.cpu_for_each_process is not None:
        got += f", {options.as_written['cpu_for_each_process']}"
    share = f"{cpus} CPU{'s' * (cpus > 1)}"
    expected = f"{count} ranks of {share} must fit, rank 0 on this node, and the cluster has {_list(on_cluster)}"
    return error_message(got, expected, "Lower num_processes, or add nodes to the cluster before the call")


def _in_use(options: Options, count: int, cpus: int) -> str:
    got = f"{count} × {cpus} CPUs were not free within {options.timeout:g} s"
    expected = f"rank 0 must be on this node; available: {_list(nodes(), free=True)}"
    return error_message(got, expected, "End other jobs, request fewer CPUs, or pass a longer timeout")


def _list(on_cluster: Sequence[Node], *, free: bool = False) -> str:
    parts = [f"{node.free if free else node.cpus} CPUs on {node.address}" for node in on_cluster]
    return f"{parts[0]} (this node)" + "".join(f", {part}" for part in parts[1:])


class Actor(Worker):
    """A `Worker` that Ray starts as `placed`, with a `setting` for `RankWorker`; it reports in `store`."""

    def __init__(self, rank: int, node: Node, store: Store, setting: dict[str, Any], **placed: Any) -> None:
        super().__init__(rank)
        self.node = node
        self._store = store
        self._failure: Failure | None = None
        self._questions = itertools.count(1)
        self._handle = _actor_class().options(max_restarts=0, **placed).remote(f"rank {rank}")
        self._calls = [self._handle.begin.remote(setting, pickle.dumps(RankWorker))]  # calls run in order

    def write(self, name: str, content: Any) -> None:
        """Make it write a file of the payload; `content` is a reference from `put_files`."""
        self._calls.append(self._handle.write.remote(name, content))

    def run(self) -> None:
        """Make it do the task."""
        self._calls.append(self._handle.run.remote())

    def poll(self) -> Failure | None:
        """See `Worker.poll`."""
        self.ready = self.ready or self._store.check([READY.format(self.rank)])
        if not (self.finished or self._failure) and ray.wait(self._calls[-1:], timeout=0)[0]:
            self._failure = self._result()
            self.finished = self._failure is None
        return self._failure

    def stack_dump(self) -> str:
        """See `Worker.stack_dump`."""
        number = next(self._questions)
        self._store.set(ASKED.format(self.rank, number), "")
        answer, deadline = STACK.format(self.rank, number), time.monotonic() + _ANSWER
        while not self._store.check([answer]):
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.02)
        return str(self._store.get(answer).decode())

    def kill(self) -> None:
        """End the process immediately."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended, or Ray has been shut down
            ray.kill(self._handle, no_restart=True)

    def close(self) -> None:
        """See `Worker.close`."""
        self.kill()
        ray.wait(self._calls[-1:], timeout=_ENDING)

    def _result(self) -> Failure | None:
        """Return the failure of the task or the process; None if the task has returned."""
        try:
            failure: Failure | None = ray.get(self._calls)[-1]  # raises the error of the first failed call
        except _GONE as error:
            reason = " ".join(str(error).split())
            with contextlib.suppress(ValueError):  # the rest of Ray's text is ids and hints for its developers
                reason = reason[: reason.index(" class_name:")] + reason[reason.index(" The actor ") :]
            failure = Failure(self.rank, Kind.CAUSE, "ended its process", _ADVICE)
            failure.traceback = f"Ray says: {reason[:_LONGEST]}"
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            failure = Failure(self.rank, Kind.CAUSE, f"failed ({type(cause).__name__}: {str(cause)[:500]})", _ADVICE)
            if isinstance(cause, ImportError):
                failure = Failure(self.rank, Kind.CAUSE, f"could not import nano_loop ({cause})", _INSTALL)
        if failure is not None and failure.kind not in (Kind.LATE, Kind.LEFT):
            failure.what = f"on {self.node} {failure.what}"
            if "raised FileNotFoundError" in failure.what:
                failure.advice = _SHARED
        return failure


def put_files(folder: Path) -> Iterator[tuple[str, Any]]:
    """Put the files below a folder, one by one, where all nodes can read them, for as long as a reference exists."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield str(path.relative_to(folder)), ray.put(np.fromfile(path, np.uint8))


def _actor_class() -> Any:
    """Create the actors' class, which is sent by value, so that nothing is imported before the environment is set."""

    class Rank:
        def __init__(self, name: str) -> None:
            self._name = name
            self._worker: Any = None

        def __repr__(self) -> str:  # Ray prefixes each output line of the process with it
            return self._name

        def begin(self, setting: dict[str, Any], worker: bytes) -> None:
            import pickle
            import sys

            for name in [name for name in os.environ if name.startswith(setting["without"])]:
                del os.environ[name]
            os.environ.update(setting["environ"])
            sys.path.extend(entry for entry in setting["path"] if entry not in sys.path and os.path.exists(entry))
            self._worker = pickle.loads(worker)(setting)  # a class sent by name

        def write(self, name: str, content: Any) -> None:
            self._worker.write(name, content)

        def run(self) -> Any:
            return self._worker.run()

    return ray.remote(Rank)
