"""On which node each rank of a run is, and how many CPUs it has."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nano_loop.distributed.launch.ray.cluster import Actor, Node, Placement, nodes
from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.options import Options

_INTERVAL = 0.2  # seconds between two looks for Ctrl-C


@dataclass(frozen=True)
class Plan:
    """The places of all ranks, which are reserved.

    Parameters
    ----------
    nodes : list of Node
        By rank, those of one node beside each other.
    each : int
        The CPUs of each rank.
    bundles : list of int
        The bundles of the placement group, by rank.
    placement : Placement
        The placement group.
    """

    nodes: list[Node]
    each: int
    bundles: list[int]
    placement: Placement

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.nodes)

    def name(self, rank: int) -> str:
        """Return the node of a rank, for messages."""
        return f"node {self.nodes[rank].address} ({self.nodes[rank].id[:8]})"

    def actor(self, rank: int) -> Actor:
        """Start the actor of a rank."""
        return self.placement.actor(self.bundles[rank], self.each, f"rank {rank}")

    def share(self, rank: int) -> tuple[int, int] | None:
        """Return the CPUs of a rank, and those of its node; None where the ranks of the run hold the whole host."""
        node = self.nodes[rank]
        held = Counter(each.id for each in self.nodes)[node.id] * self.each
        # Nodes of one host, as in a test, do not know of each other.
        alone = all(each.id == node.id or each.address != node.address for each in nodes())
        return None if alone and held + self.each > node.cpus else (self.each, node.cpus)


@contextmanager
def planned(options: Options, check: Callable[[], None]) -> Iterator[Plan]:
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
    count, found = options.num_processes or 1, nodes()
    given = options.cpu_for_each_process
    each = given if isinstance(given, int) else largest(found, count)
    if each < 1 or not _fits([node.cpus for node in found], count, each):
        raise NanoConfigError(_too_few(options, count, max(each, 1), found))
    placement = Placement(found[0], count, each)
    try:
        deadline = time.monotonic() + options.timeout
        while not placement.wait(_INTERVAL):
            check()
            if time.monotonic() > deadline:
                raise NanoError(_in_use(options, count, each))
        ids = placement.nodes()
        # The bundle on the caller's node comes first, and has no actor.
        order = [node.id for node in found]
        bundles = sorted(range(count), key=lambda bundle: (order.index(ids[bundle]), bundle))
        by_id = {node.id: node for node in found}
        yield Plan([by_id[ids[bundle]] for bundle in bundles], each, bundles, placement)
    finally:
        placement.remove()


def largest(found: Sequence[Node], count: int) -> int:
    """Return the most CPUs that each of `count` ranks can have: of those that are free, or else of all; 0 if none."""
    for cpus in ([node.free for node in found], [node.cpus for node in found]):
        fitting = (each for each in range(max(cpus), 0, -1) if _fits(cpus, count, each))
        if each := next(fitting, 0):
            return each
    return 0


def _fits(cpus: Sequence[int], count: int, each: int) -> bool:
    """Whether nodes with these CPUs have room for `count` ranks, one of them on the first node, the caller's."""
    return cpus[0] >= each and sum(node // each for node in cpus) >= count


def _too_few(options: Options, count: int, each: int, found: Sequence[Node]) -> str:
    given = options.as_written["num_processes"]
    if options.cpu_for_each_process is not None:
        given += f", {options.as_written['cpu_for_each_process']}"
    cpus = f"{each} CPU{'s' * (each > 1)}"
    needed = f"{count} ranks of {cpus} need room, rank 0 on this node, and the cluster has {_list(found)}"
    return problem(given, needed, "Lower num_processes, or add nodes to the cluster before the call")


def _in_use(options: Options, count: int, each: int) -> str:
    given = f"{count} × {each} CPUs were not free within {options.timeout:g} s"
    needed = f"rank 0 is on this node, and free are {_list(nodes(), free=True)}"
    return problem(given, needed, "End other jobs, ask for less, or pass a longer timeout")


def _list(found: Sequence[Node], *, free: bool = False) -> str:
    parts = [f"{each.free if free else each.cpus} CPUs on {each.address}" for each in found]
    return f"{parts[0]} (this node)" + "".join(f", {part}" for part in parts[1:])
