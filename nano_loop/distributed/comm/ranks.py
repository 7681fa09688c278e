"""One rank's view of the others: their identities and locations, and the exchange of values with them.

All waits are Python loops with checks, so signals and failed ranks end them immediately.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import cloudpickle
import torch

from nano_loop.distributed.comm.raw_bytes import raw_bytes, resolved
from nano_loop.distributed.comm.split_batches import Share, SplitBatches, random_state
from nano_loop.errors import NanoWorkerError, RankLateError, error_message

Value = TypeVar("Value")

_OF_GLOO = "Timed out waiting"  # in the error of a collective that has exceeded its group's timeout


#: The purpose of the exchanges by which ranks start to iterate a loader together.
ITERATION = "the iteration of a loader"


class Channel(Protocol):
    """Transfers bytes between the ranks of a run. Gradients are averaged by other transports."""

    def exchange(self, data: bytes | memoryview, what: str) -> list[bytearray]:
        """Return the bytes of all ranks, in rank order; lengths may differ. Collective.

        Every rank must call it in the same order. Waits raise an error if another rank has failed or left, or after the
        run's timeout. `what` is the purpose, the same on every rank; the error names it if ranks diverge.
        """


@dataclass(frozen=True)
class Loop:
    """The user's function that the ranks of a run execute, as named in messages.

    `collectives` is the prefix for names of collectives in the user's code.
    """

    name: str = "train"
    collectives: str = "self"

    @property
    def same_steps(self) -> tuple[str, str]:
        """The last two parts of a message about ranks that have taken different numbers of steps."""
        agree = f"{self.collectives}.broadcast(stop) or {self.collectives}.all_reduce(loss)"
        advice = f"If a rank stops based on its own values, make all ranks agree first: {agree}"
        return "all ranks must run the same number of steps", advice


def by_host(hosts: Sequence[object]) -> list[list[int]]:
    """Group ranks by host, given the host of each rank, ordered by the hosts' first ranks."""
    ranks: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return [*ranks.values()]


@dataclass
class ShardingState:
    """One rank's knowledge about how the work of its run is divided."""

    undivided: bool = False  # whether all ranks computed the same when they last compared; the same on all ranks
    whole: bool = False  # whether all ranks received the latest batch
    implicit_loaders: bool = False  # whether a loader that was not set up was divided
    #: Data sets that each rank iterated in full, as ranks have other items: by name, whether two ranks had the same.
    own_shares: dict[str, bool] = field(default_factory=dict)


@dataclass
class RunContext:
    """Shared context of the ranks of a run, in addition to their identities and channel, and local state."""

    loop: Loop = field(default_factory=Loop)
    #: A separate process group of all ranks on several hosts for gradients, concurrent with values; None on one host.
    gradient_group: Any = None
    #: The `shared_memory.deadlocks.Waits`, which detects ranks that wait for each other; None across hosts.
    waits: Any = None
    #: Called on all ranks after gradients have been averaged, with the number of averagings so far.
    after_averaging: list[Callable[[int], None]] = field(default_factory=list)
    #: The seed of torch at the start of the run; None once this rank's random numbers differ from the others'.
    common_seed: int | None = None
    sharding: ShardingState = field(default_factory=ShardingState)
    split: SplitBatches | None = None  # how the ranks share each batch; None if each rank gets different batches
    #: On rank 0, the process that computes whole batches, if any; in that process, the sender of its reports.
    witness: Any = None

    @property
    def divided(self) -> Share | None:
        """See `SplitBatches.divided`."""
        return None if self.split is None else self.split.divided


def _check_nothing() -> None:
    """Raise nothing. A named function, so that it can be pickled."""


class Ranks:
    """The ranks of one run, as seen by one of them; by default the only rank.

    `local_rank` and `local_size` are among the ranks on this host. `check` raises if another rank has failed or left;
    it is called while this rank waits, at most for `timeout` seconds. `shares` are the logical CPUs of each rank on
    this host, and `loader_cpus` those of this rank's `DataLoader` workers; both are empty if nothing is bound. `folder`
    is a private folder in shared memory that the ranks of this host share. `names` are the numbers of the ranks in
    messages.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        local_rank: int = 0,
        local_size: int = 1,
        check: Callable[[], None] = _check_nothing,
        timeout: float = 600.0,
        shares: tuple[tuple[int, ...], ...] = (),
        loader_cpus: tuple[int, ...] = (),
        folder: Path | None = None,
        context: RunContext | None = None,
        names: Sequence[int] = (),
    ) -> None:
        self.rank: Final = rank
        self.size: Final = size
        self.local_rank: Final = local_rank
        self.local_size: Final = local_size
        self.check = check
        self.timeout: Final = timeout
        self.shares: Final = shares
        self.loader_cpus: Final = loader_cpus
        self.folder: Final = folder
        self.context = RunContext() if context is None else context
        self.names: Final = names or range(size)
        self.channel: Channel = None  # type: ignore[assignment]  # until the ranks have joined

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks share this host's memory."""
        return self.local_size == self.size

    def group(self, members: Sequence[int], *, timeout: float | None = None) -> Ranks:
        """Return this rank's view of `members`, ranks in ascending order, which messages name by these numbers."""
        return Ranks(
            members.index(self.rank),
            len(members),
            timeout=self.timeout if timeout is None else min(timeout, self.timeout),
            check=lambda: self.check(),  # looked up each time, because it may be set later
            context=self.context,
            names=members,
        )

    @property
    def have_joined(self) -> bool:
        """Whether the ranks can exchange values."""
        return self.channel is not None

    @contextmanager
    def sharing_batches(self) -> Iterator[None]:
        """Let the ranks share each batch in the body."""
        self.context.split = split = SplitBatches()
        try:
            yield
        except (RuntimeError, ValueError, AssertionError, IndexError) as error:
            split.explain(error)
            raise
        finally:
            self.context.split = None

    def broadcast(self, value: Value, source: int = 0, what: str = "") -> Value:
        """Return the value of rank `source` on all ranks. Collective; for `what`, see `Channel`."""
        if self.size == 1:
            return value
        own = self.rank == source
        data = self.channel.exchange(cloudpickle.dumps(value) if own else b"", what or f"broadcast of {source}")
        received: Value = value if own else pickle.loads(data[source])
        return received

    def gather(self, value: Value, what: str = "") -> list[Value]:
        """Return the values of all ranks, in rank order, on every rank; see `broadcast`. Collective."""
        if self.size == 1:
            return [value]
        return [pickle.loads(data) for data in self.channel.exchange(cloudpickle.dumps(value), what or "gather")]

    def equalize_random_states(self, what: str, states: Sequence[object] = ()) -> None:
        """Give torch's generator rank 0's state, if ranks that share batches have other `states`. Collective."""
        assert self.context.split is not None
        self.context.split.unequal_since = None
        if len({*(states or self.gather(random_state(), what))}) > 1:
            torch.set_rng_state(self.broadcast(torch.get_rng_state(), what=what))

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite strided CPU tensors, not quantized and of the same shapes everywhere, with rank 0's. Collective."""
        if self.size == 1:
            return
        for tensor in tensors:
            memory = raw_bytes(whole := resolved(tensor))
            what = f"broadcast of 0, {len(memory)} bytes"
            received, *_ = self.channel.exchange(memory if self.rank == 0 else b"", what)
            if self.rank != 0:
                memory[:] = received
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(whole)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of all ranks' `tensor` as a new tensor. Collective."""
        first, *others = self.gather(tensor.detach().clone())
        return sum(others, first) / self.size

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        if self.size > 1:
            self.channel.exchange(b"", "barrier")

    def finish(self, work: Any) -> None:
        """Wait for a torch collective started with ``async_op=True``; raise a `NanoError` after the timeout."""
        deadline = time.monotonic() + self.timeout

        def check_others() -> None:
            self.check()
            if time.monotonic() > deadline:
                raise self._late()

        wait_until(work.is_completed, check_others)
        try:
            work.wait()  # raises the error of the collective
        except RuntimeError as error:
            if _OF_GLOO not in str(error):
                raise
            raise self._late() from error  # gloo's timeout started with the collective

    def late_message(self, others: str, purpose: str) -> str:
        """Return the message for this rank if it has waited in vain for `others`, to do something together."""
        got = f"rank {self.names[self.rank]} has waited {self.timeout:g} seconds for {others} to {purpose}"
        hint = f"Find out what delays {others}, or pass a longer timeout"
        return error_message(got, "every rank must reach it within the timeout", hint)

    def _late(self) -> RankLateError:
        message = self.late_message("the other ranks", "join a collective")
        return RankLateError(message, 1 - self.rank if self.size == 2 else None)


#: A run of one process.
ALONE = Ranks()

_SPINNING, _LONGEST_NAP = 0.0005, 0.002  # seconds


def wait_until(done: Callable[[], bool], check: Callable[[], None]) -> None:
    """Wait for `done` while calling `check`: first by spinning, then with increasing sleeps of up to 2 ms."""
    if done():
        return
    started = time.perf_counter()
    while not done():
        waited = time.perf_counter() - started
        if waited > _SPINNING:
            try:
                check()
            except NanoWorkerError:
                # A failed rank may have sent the result since, which may lead to a more specific error.
                if not done():
                    raise
                return
            time.sleep(min(waited / 20, _LONGEST_NAP))
