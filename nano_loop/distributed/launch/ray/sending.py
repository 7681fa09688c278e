"""How the payload of a run gets to the actors: through shared memory on the caller's node, by Ray to all others.

Each other node gets it once: the first actor there writes it to a folder in shared memory, and all map it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from nano_loop.distributed.launch.ray import cluster
from nano_loop.distributed.launch.ray.asking import together
from nano_loop.distributed.launch.ray.cluster import Actor
from nano_loop.distributed.launch.ray.placing import Plan
from nano_loop.distributed.payload.shared_files import whole_buffer


def send(
    payload: Path, plan: Plan, actors: Mapping[int, Actor], near: Collection[int], check: Callable[[], None]
) -> None:
    """Have every actor read the payload.

    Parameters
    ----------
    payload : pathlib.Path
        Its folder on the caller's node.
    plan : Plan
        Where the actors are.
    actors : mapping of int to Actor
        By rank.
    near : collection of int
        The ranks that see this folder.
    check : callable
        Raises where the user has interrupted the run.
    """
    caller = plan.nodes[0].id
    far: dict[str, list[int]] = {}
    for rank in actors:
        if plan.nodes[rank].id != caller or rank not in near:
            far.setdefault(plan.nodes[rank].id, []).append(rank)
    first = {ranks[0]: actors[ranks[0]] for ranks in far.values()}
    folders = together({rank: actor.call("folder") for rank, actor in first.items()}, plan, check)
    if first:
        for path in sorted(path for path in payload.rglob("*") if path.is_file()):
            name, content = _named(path, payload)
            shared = cluster.put(content)
            together({rank: actor.call("write", name, shared) for rank, actor in first.items()}, plan, check)
            del shared  # Ray frees it
    of_node = {plan.nodes[rank].id: folder for rank, folder in folders.items()}
    of_rank = {rank: of_node.get(plan.nodes[rank].id, str(payload)) for rank in actors}
    together({rank: actor.call("load", of_rank[rank]) for rank, actor in actors.items()}, plan, check)
    together({rank: actor.call("forget") for rank, actor in first.items()}, plan, check)


def _named(path: Path, payload: Path) -> tuple[str, Any]:
    """Return a file's name below the folder, and what it holds: of a mapping of other memory, that memory."""
    elsewhere, content = whole_buffer(path)
    name = path.with_suffix("") if elsewhere else path
    return str(name.relative_to(payload)), content
