"""How the actors of a run come to where they can join: placed, prepared, compared, and with the payload read."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_loop.distributed.launch.local.start import working_folder
from nano_loop.distributed.launch.ray import cluster
from nano_loop.distributed.launch.ray.asking import together
from nano_loop.distributed.launch.ray.call import NOT_FOR_WORKERS, THREAD_VARIABLES, WORKER, versions
from nano_loop.distributed.launch.ray.cluster import Actor
from nano_loop.distributed.launch.ray.lifeline import Lifelines
from nano_loop.distributed.launch.ray.placing import Plan, planned
from nano_loop.distributed.launch.ray.process import ActorProcess
from nano_loop.distributed.launch.ray.sending import send
from nano_loop.errors import NanoError, problem
from nano_loop.options import Options

_CONNECTING = 30.0  # seconds that the actors' connections may take, which they have made already


@dataclass
class Started:
    """The actors of a run, each with its payload.

    Parameters
    ----------
    workers : list of ActorProcess
        The actors, by rank from 1 on.
    plan : Plan
        Where they are.
    """

    workers: list[ActorProcess]
    plan: Plan

    @property
    def address(self) -> str:
        """That of the caller's node."""
        return self.plan.nodes[0].address

    @property
    def share(self) -> tuple[int, int] | None:
        """See `Plan.share`, of rank 0."""
        return self.plan.share(0)

    def run(self, host: str, port: int) -> None:
        """Have all actors join at a store."""
        for each in self.workers:
            each.run(host, port, self.plan.nodes[each.rank].address, self.plan.share(each.rank))


@contextmanager
def started(options: Options, payload: Path, secret: bytes, check: Callable[[], None]) -> Iterator[Started]:
    """Start the actors of a run and have them read the payload; end them on leaving.

    Parameters
    ----------
    options : Options
        The options of the run.
    payload : pathlib.Path
        The folder with the payload, on this node.
    secret : bytes
        By which values are signed between nodes.
    check : callable
        Raises where the user has interrupted the run.

    Raises
    ------
    NanoError
        If there are too few CPUs, or a node does not fit.
    NanoWorkerError
        If an actor ends, or cannot read the payload.
    """
    with ExitStack() as stack:
        plan = stack.enter_context(planned(options, check))
        actors = _actors(plan, stack)
        setting = {**_of_caller(options, payload, plan.each), "secret": secret, "token": secrets.token_hex(32)}
        lifelines = Lifelines(plan.nodes[0].address, setting["token"])
        stack.callback(lifelines.close)
        setting["lifeline"] = lifelines.place
        said = together({rank: each.begin({**setting, "rank": rank}) for rank, each in actors.items()}, plan, check)
        _refuse_other_versions(said, plan)
        connections = lifelines.accept({*actors}, _CONNECTING, check)
        _refuse_unconnected({*actors} - connections.keys(), plan)
        workers = [ActorProcess(rank, plan.name(rank), actors[rank], connections[rank]) for rank in actors]
        for each in workers:
            stack.callback(each.close)
        send(payload, plan, actors, {rank for rank, each in said.items() if each["sees"]}, check)
        yield Started(workers, plan)


def _actors(plan: Plan, stack: ExitStack) -> dict[int, Actor]:
    """Start the actors, to be killed when `stack` is left."""
    actors: dict[int, Actor] = {}
    for rank in range(1, plan.size):
        actors[rank] = plan.actor(rank)
        stack.callback(actors[rank].kill)
    return actors


def _of_caller(options: Options, payload: Path, cpus: int) -> dict[str, Any]:
    """Return what actors take over of the caller's process before they import torch."""
    users = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    shipped = cluster.working_folder_is_shipped()
    return {
        "worker": WORKER,
        "payload": str(payload),
        "argv": [*map(str, sys.argv)],
        "path": [os.path.abspath(each) for each in sys.path],
        "cwd": None if shipped else working_folder(),
        "verbose": options.verbose == "all",
        "threads_are_chosen": bool(users),
        "without": NOT_FOR_WORKERS,
        "environ": {THREAD_VARIABLES[0]: str(cpus), "TQDM_DISABLE": "1", "PYTHONBREAKPOINT": "0", **users},
    }


def _refuse_other_versions(said: Mapping[int, Any], plan: Plan) -> None:
    mine = versions()
    for rank, each in said.items():
        for name, version in mine.items():
            if each["versions"][name] != version:
                given = f"{plan.name(rank)} has {name} {each['versions'][name]}, and the caller's has {version}"
                needed = "all ranks compute with the same versions"
                raise NanoError(problem(given, needed, "Give every node the same Python environment"))


def _refuse_unconnected(ranks: set[int], plan: Plan) -> None:
    for rank in sorted(ranks):
        given = f"rank {rank} on {plan.name(rank)} has not connected to {plan.nodes[0].address}"
        needed = "the ranks connect to each other at the addresses by which Ray knows the nodes"
        raise NanoError(problem(given, needed, "Open all ports between the nodes"))
