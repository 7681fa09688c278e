"""The placement of the ranks of a run: on which node each is, and how many CPUs it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nano_loop.config.options import Options
from nano_loop.distributed.launch_ray.cluster import Node, Placement, nodes
from nano_loop.errors import NanoConfigError, NanoError, error_message


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
    return error_message(got, expected, "Lower num_processes, or add nodes to the cluster before the call")


def _in_use(options: Options, count: int, cpus: int) -> str:
    got = f"{count} × {cpus} CPUs were not free within {options.timeout:g} s"
    expected = f"rank 0 is on this node, and free are {_list(nodes(), free=True)}"
    return error_message(got, expected, "End other jobs, ask for less, or pass a longer timeout")


def _list(on_cluster: Sequence[Node], *, free: bool = False) -> str:
    parts = [f"{node.free if free else node.cpus} CPUs on {node.address}" for node in on_cluster]
    return f"{parts[0]} (this node)" + "".join(f", {part}" for part in parts[1:])
