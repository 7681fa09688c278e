"""Calls of several actors at a time, and the errors for what goes wrong in one of them before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nano_loop.distributed.launch.failure import Failure, Kind
from nano_loop.distributed.launch.ray import cluster
from nano_loop.distributed.launch.ray.failures import failure_of, lost
from nano_loop.distributed.launch.ray.placing import Plan
from nano_loop.errors import NanoError, problem

_INTERVAL = 0.1  # seconds between two looks for Ctrl-C


def together(calls: Mapping[int, Any], plan: Plan, check: Callable[[], None]) -> dict[int, Any]:
    """Return the results of calls of actors, by rank.

    Parameters
    ----------
    calls : mapping of int to reference
        What `Actor.call` has returned, by rank.
    plan : Plan
        Where the actors are.
    check : callable
        Raises where the user has interrupted the run.

    Raises
    ------
    NanoError
        If an actor does not find nano_loop or what it needs.
    NanoWorkerError
        If an actor ends, or a call fails.
    """
    waiting, results = dict(calls), {}
    while waiting:
        check()
        done = cluster.completed([*waiting.values()], _INTERVAL)
        for rank in [rank for rank, each in waiting.items() if each in done]:
            results[rank] = _result(rank, waiting.pop(rank), plan)
    return results


def _result(rank: int, reference: Any, plan: Plan) -> Any:
    try:
        said = cluster.result(reference)
    except cluster.RayError as error:
        raise _refusal(rank, error, plan) from None
    if isinstance(said, dict) and "failure" in said:
        raise failure_of(said, plan.name(rank)).as_error()
    return said


def _refusal(rank: int, error: BaseException, plan: Plan) -> NanoError:
    cause, node = cluster.cause_of(error), plan.name(rank)
    if isinstance(error, cluster.Gone):
        return lost(rank, node, error).as_error()
    if isinstance(cause, ImportError):
        given = f"rank {rank} on {node} could not import nano_loop ({cause})"
        needed = "every node needs the same Python environment as the caller's"
        advice = 'Install it there, or ship code with ray.init(runtime_env={"working_dir": ".", "py_modules": [...]})'
        return NanoError(problem(given, needed, advice))
    what = f"on {node} could not be prepared ({type(cause).__name__}: {str(cause)[:500]})"
    return Failure(rank, Kind.CAUSE, what, "See its standard error, and Ray's logs on that node").as_error()
