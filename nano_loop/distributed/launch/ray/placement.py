"""The placement of the ranks of a run: on which node each is, and how many CPUs it has."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nano_loop.distributed.launch.ray.actor import Actor
from nano_loop.distributed.launch.ray.cluster import Node, nodes
from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.options import Options

_INTERVAL = 0.2  # seconds between two looks for Ctrl-C


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
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


@contextmanager
def reserved(options: Options, check: Callable[[], None]) -> Iterator[Placement]:
    """Reserve CPUs for all ranks, and give them back on leaving.

    Parameters
    ----------
    options : Options
        The options of the run.
    check : callable
        Raises where the user has interrupted the run.

    Raises
    ------
    NanoConfigError
        If the cluster has too few CPUs.
    NanoError
        If they are in use for longer than the timeout.
    """
    count, on_cluster = options.num_processes or 1, nodes()
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
    """Return the most CPUs that each of `count` ranks can have: of those that are free, or else of all; 0 if none."""
    for room in ([node.free for node in on_cluster], [node.cpus for node in on_cluster]):
        fitting = (cpus for cpus in range(max(room), 0, -1) if _fits(room, count, cpus))
        if cpus := next(fitting, 0):
            return cpus
    return 0


def _fits(room: Sequence[int], count: int, cpus: int) -> bool:
    """Whether nodes with room for so many CPUs hold `count` ranks, one of them on the first node, the caller's."""
    return room[0] >= cpus and sum(node // cpus for node in room) >= count


def _too_few(options: Options, count: int, cpus: int, on_cluster: Sequence[Node]) -> str:
    got = options.as_written["num_processes"]
    if options.cpu_for_each_process is not None:
        got += f", {options.as_written['cpu_for_each_process']}"
    share = f"{cpus} CPU{'s' * (cpus > 1)}"
    expected = f"{count} ranks of {share} need room, rank 0 on this node, and the cluster has {_list(on_cluster)}"
    return problem(got, expected, "Lower num_processes, or add nodes to the cluster before the call")


def _in_use(options: Options, count: int, cpus: int) -> str:
    got = f"{count} × {cpus} CPUs were not free within {options.timeout:g} s"
    expected = f"rank 0 is on this node, and free are {_list(nodes(), free=True)}"
    return problem(got, expected, "End other jobs, ask for less, or pass a longer timeout")


def _list(on_cluster: Sequence[Node], *, free: bool = False) -> str:
    parts = [f"{node.free if free else node.cpus} CPUs on {node.address}" for node in on_cluster]
    return f"{parts[0]} (this node)" + "".join(f", {part}" for part in parts[1:])
