"""Collectives for the ranks of the current run, with the names and arguments of Fabric's methods.

Call them in a function that `nano_loop.nano` decorates, or in code that it calls. With one process, and outside a run,
they do what Fabric does with one process. They do not import Fabric, because that takes as long as importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import distributed

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.tensor_collectives import check_arguments, gathered, reduced
from nano_loop.distributed.launch.join_run import current_ranks
from nano_loop.errors import NanoConfigError, NanoError, error_message, shown


def all_reduce(data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
    """Reduce tensors over all ranks. All ranks must call it.

    Parameters
    ----------
    data : torch.Tensor, int, float, or a collection of them
        The values. Tensors are changed in place; their gradients stay those of this rank. Integers are reduced as
        int64, floats as float64.
    group : torch.distributed.ProcessGroup, optional
        The ranks. By default, all.
    reduce_op : str or torch.distributed.ReduceOp
        The operation, such as ``"mean"`` or ``"sum"``. The mean of integers is an integer, as in Fabric. If ranks
        share batches, the mean of floats is weighted by each rank's number of samples in the latest batch.

    Returns
    -------
    torch.Tensor or a collection of them
        The reduced values, in the structure of `data`. Numbers become tensors. With one process, values do not
        change.

    Raises
    ------
    NanoConfigError
        If an integer needs more than 64 bits, or `group` or `reduce_op` has the wrong type.

    Examples
    --------
    >>> import nano_loop
    >>> nano_loop.all_reduce({"loss": 0.5})["loss"].item()
    0.5
    """
    ranks = _joined("all_reduce")
    check_arguments(group, reduce_op)
    return _of_tensors(lambda value: value if ranks.size == 1 else reduced(ranks, value, group, reduce_op), data)


def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
    """Return the tensors of all ranks. All ranks must call it, with tensors of the same shape.

    Parameters
    ----------
    data : torch.Tensor, int, float, or a collection of them
        The values.
    group : torch.distributed.ProcessGroup, optional
        The ranks. By default, all.
    sync_grads : bool
        Whether gradients flow back to each rank's tensors.

    Returns
    -------
    torch.Tensor or a collection of them
        The tensors of all ranks, stacked along a new first dimension. With one process, there is no new dimension.
    """
    ranks = _joined("all_gather")
    check_arguments(group)
    return _of_tensors(lambda value: value if ranks.size == 1 else gathered(ranks, value, group, sync_grads), data)


def broadcast(obj: Any, src: int = 0) -> Any:
    """Return the object of rank `src`. All ranks must call it.

    Parameters
    ----------
    obj : object
        A tensor, number, string or collection, or any object that can be pickled.
    src : int
        The rank whose object is returned.

    Returns
    -------
    object
        The object of rank `src`.

    Raises
    ------
    NanoConfigError
        If there is no such rank.

    Examples
    --------
    >>> import nano_loop
    >>> nano_loop.broadcast({"stop": False})
    {'stop': False}
    """
    ranks = _joined("broadcast")
    if type(src) is not int or not 0 <= src < ranks.size:
        expected = f"it must be one of the ranks, from 0 to {ranks.size - 1}"
        raise NanoConfigError(error_message(shown("src", src), expected, "Pass src=0"))
    return ranks.broadcast(obj, src)


def barrier(name: str | None = None) -> None:
    """Wait until all ranks have called it.

    Parameters
    ----------
    name : str, optional
        A parameter of Fabric. It has no effect.
    """
    _joined("barrier").barrier()


def global_rank() -> int:
    """Return the global rank of this process: 0 with one process."""
    return current_ranks().rank


def local_rank() -> int:
    """Return the rank of this process on this host."""
    return current_ranks().local_rank


def world_size() -> int:
    """Return the number of processes: 1 outside a run."""
    return current_ranks().size


def share() -> float:
    """Return the fraction of the latest batch that this rank has: 1.0 with one process.

    If ranks share a batch (``split_batches=True``), the loss of a rank is expected to be a mean over its samples.
    For a mean over another count, such as words, divide the sum by the count of all ranks and by the share.

    Examples
    --------
    >>> import torch, nano_loop
    >>> losses, count = torch.ones(3), torch.tensor(3.0)
    >>> count = nano_loop.all_reduce(count, reduce_op="sum")
    >>> (losses.sum() / count / nano_loop.share()).item()
    1.0
    """
    ranks = current_ranks()
    return (1.0 if ranks.context.split is None else ranks.context.split.weight) / ranks.size


class _IsGlobalZero:
    """A function that also works without parentheses in a condition, like Fabric's property."""

    __name__ = __qualname__ = "is_global_zero"

    def __call__(self) -> bool:
        """Return whether this process is rank 0: True with one process."""
        return current_ranks().rank == 0

    def __bool__(self) -> bool:
        return self()

    def __reduce__(self) -> str:
        return self.__name__


is_global_zero = _IsGlobalZero()
is_global_zero.__doc__ = _IsGlobalZero.__call__.__doc__


def _joined(name: str) -> Ranks:
    """Return the current ranks for a collective."""
    ranks = current_ranks()
    if ranks.size > 1 and not distributed.is_initialized():
        got = f"nano_loop.{name} outside a run, in one of {ranks.size} processes"
        expected = "the processes are connected from the start of a run to its end"
        raise NanoError(error_message(got, expected, "Call it in the function that nano decorates"))
    return ranks


def _of_tensors(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """Apply a function to each tensor of a collection; numbers and arrays become tensors."""
    if isinstance(data, (str, bytes)):
        raise NanoConfigError(
            error_message(shown("data", data), "it must be a tensor or a number", "Send other objects with broadcast")
        )
    for kind, convert in _CONVERSIONS.items():
        data = apply_to_collection(data, kind, convert)
    return apply_to_collection(data, torch.Tensor, function)


def _of_int(value: int) -> torch.Tensor:
    if not -(1 << 63) <= value < 1 << 63:
        expected, hint = "an integer has 64 bits at most", "Pass a float"
        raise NanoConfigError(error_message(shown("data", value), expected, hint))
    return torch.tensor(value, dtype=torch.int64)


_CONVERSIONS: dict[type, Callable[[Any], torch.Tensor]] = {
    bool: lambda value: torch.tensor(value, dtype=torch.uint8),
    int: _of_int,
    float: lambda value: torch.tensor(value, dtype=torch.float64),
    np.generic: lambda value: torch.from_numpy(np.array(value)),
    np.ndarray: torch.from_numpy,
}
