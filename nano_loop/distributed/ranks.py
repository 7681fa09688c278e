"""One rank's view of the others: who it is, how many there are, and how values travel between them.

Every wait is a Python loop with checks, so that a signal, or a rank that has failed, ends it at once.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import distributed

from nano_loop.errors import NanoError

Value = TypeVar("Value")


class RankLeftError(NanoError):
    """Another rank has left the run: it has returned from the loop, or it has failed, which it reports itself.

    Parameters
    ----------
    message : str
        What happened, for a person.
    rank : int
        The rank that has left.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class Ranks:
    """The ranks of one run, as one of them sees it; by default the only rank there is.

    Parameters
    ----------
    rank, size : int
        This rank, and how many there are.
    local_rank, local_size : int
        The same among the ranks of this host.
    check : callable
        Raises where another rank has failed or left; it is called while this one waits.
    timeout : float
        Seconds that this rank waits for another.
    shares : tuple of tuples of int
        The logical CPUs of each rank of this host, by local rank; empty where nothing is bound.
    loader_cpus : tuple of int
        The logical CPUs for this rank's `DataLoader` workers; empty where nothing is bound.
    folder : pathlib.Path or None
        A private folder in shared memory, that the ranks of this host have in common.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        local_rank: int = 0,
        local_size: int = 1,
        check: Callable[[], None] = lambda: None,
        timeout: float = 600.0,
        shares: tuple[tuple[int, ...], ...] = (),
        loader_cpus: tuple[int, ...] = (),
        folder: Path | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.check = check
        self.timeout = timeout
        self.shares = shares
        self.loader_cpus = loader_cpus
        self.folder = folder
        #: torch's seed when the run began; None once this rank's random numbers differ from the others'.
        self.common_seed: int | None = None

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks share this host's memory."""
        return self.local_size == self.size

    def broadcast(self, value: Value, source: int = 0) -> Value:
        """Return the value that rank `source` has; it is pickled. Collective."""
        if self.size == 1:
            return value
        received: Value = self._exchange(value, source)
        return received

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, by rank, on every rank; they are pickled. Collective."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.finish(distributed.all_gather(lengths, torch.tensor([len(data)]), async_op=True))
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self.finish(distributed.all_gather(received, padded, async_op=True))
        return [pickle.loads(bytes(each[: int(n)].numpy())) for each, n in zip(received, lengths, strict=True)]

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` in place with rank `source`'s. Collective; the same shapes and dtypes on every rank."""
        if self.size == 1:
            return
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            plain = torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole
            self.finish(distributed.broadcast(plain, source, async_op=True))
            if self.rank != source:
                tensor.detach().copy_(whole)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor, the mean of all ranks' `tensor`. Collective."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self.finish(distributed.all_reduce(total, async_op=True))
        return total / self.size

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        if self.size > 1:
            self.finish(distributed.all_reduce(torch.zeros(1), async_op=True))

    def finish(self, work: Any) -> None:
        """Wait for a collective that was started with ``async_op=True``."""
        wait_until(work.is_completed, self.check)
        work.wait()  # raises what went wrong

    def _exchange(self, value: Any, source: int) -> Any:
        data = bytearray(cloudpickle.dumps(value) if self.rank == source else b"")
        length = torch.tensor([len(data)])
        self.finish(distributed.broadcast(length, source, async_op=True))
        content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(int(length), dtype=torch.uint8)
        self.finish(distributed.broadcast(content, source, async_op=True))
        return pickle.loads(bytes(content.numpy())) if self.rank != source else value


#: A run of one process.
ALONE = Ranks()

_SPINNING, _LONGEST_NAP = 0.0005, 0.002  # seconds


def wait_until(done: Callable[[], bool], check: Callable[[], None]) -> None:
    """Wait for `done`, calling `check` on the way: first awake, then with ever longer naps of up to 2 ms."""
    if done():
        return
    started = time.perf_counter()
    while not done():
        waited = time.perf_counter() - started
        if waited > _SPINNING:
            check()
            time.sleep(min(waited / 20, _LONGEST_NAP))
