"""The cluster that a run uses: the connection to Ray, and the nodes.

The import of Ray takes a second, so this file and those that import it are imported when a run begins that needs them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import ray
from ray._private.state import available_resources_per_node  # no public function has them by node
from ray.util import client

from nano_loop.distributed.launch.ray.caller import changes_undone_by
from nano_loop.errors import NanoConfigError, problem

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
        raise NanoConfigError(problem(got, expected, "Start the script with `ray job submit`, or on a node"))
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
