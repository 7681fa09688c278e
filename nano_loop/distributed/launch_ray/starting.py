"""The start of the actors of a run: they are placed, prepared and compared, and read the payload."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nano_loop.config.options import Options
from nano_loop.distributed.launch_ray.caller import for_actors
from nano_loop.distributed.launch_ray.cluster import Actor, Placement, put, results, working_folder_is_shipped
from nano_loop.distributed.launch_ray.placement import reserved
from nano_loop.distributed.launch_ray.rank_connections import RankConnections
from nano_loop.distributed.launch_ray.worker import RankWorker, versions
from nano_loop.distributed.payload.shared_files import whole_buffer
from nano_loop.errors import NanoError, error_message

_CONNECTING = 30.0  # seconds that the actors' connections may take, which they have made already


@contextmanager
def started(
    options: Options, payload: Path, check: Callable[[], None]
) -> Iterator[tuple[list[Actor], Placement, dict[Actor, str]]]:
    """Start the actors of a run and bring the payload to them; end them on leaving.

    Parameters
    ----------
    options : Options
        The options of the run.
    payload : pathlib.Path
        The folder with the payload, on this node.
    check : callable
        Raises where the user has interrupted the run.

    Yields
    ------
    list of Actor, Placement, dict
        The actors, by rank from 1 on, where all ranks are, and the folder of each actor's payload.

    Raises
    ------
    NanoError
        If there are too few CPUs, or a node does not fit.
    NanoWorkerError
        If an actor ends.
    """
    with ExitStack() as stack:
        placement = stack.enter_context(reserved(options, check))
        actors: list[Actor] = []
        for rank in range(1, len(placement.nodes)):
            actors.append(placement.actor(rank))
            stack.callback(actors[-1].kill)
        token = secrets.token_hex(32)
        listener = RankConnections(placement.nodes[0].address, token)
        stack.callback(listener.close)
        setting = {
            **for_actors(placement.cpus, folder_is_shipped=working_folder_is_shipped()),
            "worker": pickle.dumps(RankWorker),
            "payload": str(payload),
            "verbose": options.verbose == "all",
            "token": token,
            "place": listener.place,
        }
        presences = results({actor: actor.begin({**setting, "rank": actor.rank}) for actor in actors}, check)
        for actor, presence in presences.items():
            _refuse_other_versions(actor, presence["versions"])
        connections = listener.accept({actor.rank for actor in actors}, _CONNECTING, check)
        for actor in actors:
            _refuse_unconnected(actor, actor.rank in connections, listener)
            actor.connect(connections[actor.rank])
            stack.callback(actor.close)
        seeing = [actor for actor in actors if presences[actor]["sees"] and actor.node.id == placement.nodes[0].id]
        folders = _send(payload, actors, seeing, check)
        yield actors, placement, folders


def _send(
    payload: Path, actors: Sequence[Actor], seeing: Collection[Actor], check: Callable[[], None]
) -> dict[Actor, str]:
    """Return the folder of the payload for each actor: the caller's, or one that the first actor of its node writes."""
    first: dict[str, Actor] = {}
    for actor in actors:
        if actor not in seeing:
            first.setdefault(actor.node.id, actor)
    folders: dict[str, str] = {}
    for path in sorted(path for path in payload.rglob("*") if path.is_file()) if first else ():
        name, content = _named(path, payload)
        shared = put(content)
        written = results({actor: actor.call("write", name, shared) for actor in first.values()}, check)
        folders = {actor.node.id: folder for actor, folder in written.items()}
        del shared  # Ray frees it
    return {actor: folders.get(actor.node.id, str(payload)) for actor in actors}


def _named(path: Path, payload: Path) -> tuple[str, Any]:
    """Return a file's name below the folder, and what it holds: of a mapping of other memory, that memory."""
    elsewhere, content = whole_buffer(path)
    name = path.with_suffix("") if elsewhere else path
    return str(name.relative_to(payload)), content


def _refuse_other_versions(actor: Actor, there: dict[str, str]) -> None:
    for name, version in versions().items():
        if there[name] != version:
            got = f"{actor.node} has {name} {there[name]}, and the caller's has {version}"
            expected = "all ranks compute with the same versions"
            raise NanoError(error_message(got, expected, "Give every node the same Python environment"))


def _refuse_unconnected(actor: Actor, has_connected: bool, listener: RankConnections) -> None:
    if not has_connected:
        got = f"rank {actor.rank} on {actor.node} has not connected to {listener.place[0]}"
        expected = "the ranks connect to each other at the addresses by which Ray knows the nodes"
        raise NanoError(error_message(got, expected, "Open all ports between the nodes"))
