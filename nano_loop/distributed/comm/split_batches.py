"""How ranks share each batch (``split_batches=True``): which samples a rank computes, and their weight.

N ranks compute a batch of B samples together: each takes a contiguous share. Gradients, losses, statistics of batch
norm and random numbers equal those of one process that computes the whole batch.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch

from nano_loop.errors import NanoError, error_message
from nano_loop.patching.torch_private import in_functorch
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.patching.walk import find

#: Each batch is checked until this one, and then one in an interval: some checks take 0.1 ms.
CHECKED, CHECK_INTERVAL = 100, 10
#: Name of the exchange in which ranks choose the weight of their losses.
REDUCTION = "the first backward of a split batch"


class Share(NamedTuple):
    """One rank's part of one batch."""

    start: int  # the first sample of this rank
    stop: int  # the one after its last sample
    total: int  # the number of samples in the batch
    size: int  # the number of ranks that share it

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Share:
        """Return the share of `rank`: B // N samples or one more, or all samples if a rank would have none."""
        if total < size:
            return cls(0, total, total, size)
        least, more = divmod(total, size)
        start = rank * least + min(rank, more)
        return cls(start, start + least + (rank < more), total, size)

    @property
    def samples(self) -> int:
        """The number of samples of this rank."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes the whole batch."""
        return self.samples == self.total

    @property
    def is_even(self) -> bool:
        """Whether every rank has the same weight."""
        return self.is_whole or self.total % self.size == 0

    def may_have_rows(self, shape: Sequence[int]) -> bool:
        """Whether a size is a multiple of some rank's number of samples. All ranks decide alike for equal shapes."""
        counts = {Share.of(self.total, rank, self.size).samples for rank in (0, self.size - 1)}
        return any(size and size % count == 0 for size in shape for count in counts)

    @property
    def weight(self) -> float:
        """The factor for a mean over this rank's samples that makes the mean over ranks the mean over the batch."""
        return 1.0 if self.is_whole else self.size * self.samples / self.total


@dataclass
class _Pending:
    """The batches that one iteration has delivered since the last backward, or ahead of it."""

    shares: list[Share] = field(default_factory=list)  # a backward uses the first; others were read ahead
    #: Whether the first came when no other was pending: a loop that reads several may divide by their total size.
    is_group: bool = False

    def add(self, share: Share) -> None:
        self.is_group = self.is_group or not self.shares
        self.shares.append(share)

    def pop(self) -> None:
        self.shares, self.is_group = self.shares[1:], False


@dataclass
class SplitBatches:
    """The state of a rank whose run splits batches; ``ranks.context.split``, None if no batches are split."""

    share: Share | None = None  # of the last batch delivered to the loop's thread by a split loader
    #: How the loss reduces samples, by the witness. Shares of a sum have weight N. None before the first backward.
    reduction: Literal["mean", "sum"] | None = None
    sums: tuple[float, ...] = ()  # the `batch_sums` of the last batch, before the first backward
    batches: int = 0  # delivered so far
    draws: int = 0  # of random numbers since the last batch
    checksum: int = 0  # of the sizes and indices of all these batches, which are the same on all ranks
    #: The `random_state` at the last delivery, until ranks have checked that all have it: one may have evaluated.
    unequal_since: int | None = None
    libraries: int | None = None  # a checksum of the states of `random` and NumPy at the last delivery, if taken
    draws_several_rows: bool = False  # whether a draw has had several rows for each sample
    process: int = field(default_factory=os.getpid)  # the loop's
    thread: int = field(default_factory=threading.get_ident)
    since_backward: MutableMapping[Any, _Pending] = field(default_factory=WeakKeyDictionary)  # by iteration
    used: dict[Share, None] = field(default_factory=dict)  # shares of calls since the last backward, the latest last
    _latest: Share | None = None
    _evaluates: bool = False  # whether the latest call of a model was in eval mode, for such a batch
    _whole: Callable[[], Any] = lambda: None  # the iteration that last delivered a whole batch
    _has_called: bool = False  # whether models were called since the last backward
    _iterations: WeakSet[Any] = field(default_factory=WeakSet)  # whose batches models were called with
    _delivered: WeakKeyDictionary[Any, tuple[weakref.ref[Any], Share] | None] = field(default_factory=WeakKeyDictionary)

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.get_ident() == self.thread

    @property
    def is_loops(self) -> bool:
        """Whether the caller is the loop's computation. A deep checkpoint recomputes in another thread."""
        return os.getpid() == self.process and (self.is_here or in_backward())

    @property
    def is_checked(self) -> bool:
        """Whether checks that take time are due for the last batch."""
        return self.batches <= CHECKED or self.batches % CHECK_INTERVAL == 0

    @property
    def divided(self) -> Share | None:
        """The share of the batch of which the caller computes a part; None if all ranks compute it whole."""
        return None if self.share is None or self.share.is_whole or not self.is_loops else self.share

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Exclude random numbers drawn while a batch is loaded, which do not belong to a batch."""
        before = self.share, self.unequal_since
        self.share = self.unequal_since = None
        try:
            yield
        finally:
            self.share, self.unequal_since = before

    def deliver(self, iteration: Any, share: Share | None, batch: Any = None, checksum: int = 0) -> None:
        """Record the share of the batch that an iteration delivers now; None if every rank computes the whole batch."""
        self.share = share
        self.batches, self.draws = self.batches + 1, 0
        self.unequal_since = None if share is None else random_state()
        self.libraries = None
        if self.reduction is None:
            self.sums = batch_sums(batch)
        if share is not None:
            self.checksum = zlib.crc32(b"%d %d" % (share.total, checksum), self.checksum)
            self._latest, self._whole = share, lambda: None
            self.since_backward.setdefault(iteration, _Pending()).add(share)
            for storage in _storages(batch):
                _, other = self._delivered.get(storage) or (None, share)
                # A storage that holds the whole data set cannot identify a batch.
                self._delivered[storage] = (weakref.ref(iteration), share) if other.total == share.total else None

    def deliver_whole(self, iteration: Any) -> None:
        """Record that an iteration that began as an evaluation delivers a batch that every rank computes whole."""
        self._whole = weakref.ref(iteration)

    def note_call(self, inputs: Any, *, trains: bool) -> None:
        """Record the batch with which a model is called, which the loop may have kept, or read others ahead of."""
        if not self.is_here or in_functorch():  # tensors of torch.func have no storage
            return
        self._evaluates = self._whole() is not None
        delivered = [one for storage in _storages(inputs) if (one := self._delivered.get(storage)) is not None]
        for reference, share in delivered:
            self._use(share, [reference()])
        self._has_called = True
        if delivered or self._evaluates:
            self._evaluates = not (delivered or trains)
            self.share = self.share if self._evaluates or delivered else None
            return
        pending = {one for waiting in self.since_backward.values() for one in waiting.shares}
        known = {one for one in (*pending, self._latest, self.share) if one is not None}
        if len(known) > 1:  # identify inputs that the loop has converted by their number of rows
            rows = {tensor.size(0) for tensor in find(torch.Tensor, inputs) if tensor.dim()}
            fitting = [one for one in known if one.samples in rows]
            if len(fitting) == 1:
                self._use(fitting[0], [key for key, one in self.since_backward.items() if fitting[0] in one.shares])

    def _use(self, share: Share, iterations: Iterable[Any]) -> None:
        self.share = share
        self.used.pop(share, None)
        self.used[share] = None
        self._iterations.update(one for one in iterations if one is not None)

    def begin_backward(self) -> float:
        """Return the weight for a backward that starts now; raise a `NanoError` if its batches have different ones."""
        shares = [*self.used]
        for iteration, pending in self.since_backward.items():
            if iteration in self._iterations:
                is_used = not pending.is_group or [*self.used][-1:] == pending.shares[-1:]
                shares += [] if is_used else pending.shares
            else:
                shares += pending.shares if self._has_called else pending.shares[-1:]
            pending.pop()
        shares = [*dict.fromkeys(shares)]
        if self._evaluates and not shares:  # the loop trains in eval mode
            self.share = None
        self._has_called = self._evaluates = False
        self.used.clear()
        self._iterations.clear()
        if len({None if share.is_even else share.total for share in shares}) > 1:
            counts = ", ".join(f"{share.samples} of {share.total}" for share in shares)
            got = f"a backward after batches of which this rank has {counts} samples"
            expected = "batches that are computed together must be split in the same ratio"
            size = shares[0].size
            hint = (
                f"Make their batches of one size, or of multiples of {size} samples, with drop_last=True. "
                "Evaluate others under torch.no_grad()"
            )
            raise NanoError(error_message(got, expected, hint))
        return self.weight

    def explain(self, error: Exception) -> None:
        """Extend an error of the loop before its first backward: the rank had only a part of the batch."""
        share = self.share
        if not isinstance(error, NanoError) and self.reduction is None and share is not None and not share.is_whole:
            got = f"{type(error).__name__} with {share.samples} of {share.total} samples ({error})"
            expected = "with split_batches each rank computes its part of a batch"
            hint = "Take the number of samples from the batch, such as len(x), and not a constant"
            raise NanoError(error_message(got, expected, hint)) from error

    @property
    def weight(self) -> float:
        """The factor for the gradient at the root of a backward on this rank."""
        if self.share is None or self.share.is_whole:
            return 1.0
        return float(self.share.size) if self.reduction == "sum" else self.share.weight


def _storages(values: Any) -> Iterable[Any]:
    tensors = (one for one in find(torch.Tensor, values) if one.layout is torch.strided and not one.is_nested)
    return [tensor.untyped_storage() for tensor in tensors]


def random_state() -> int:
    """Return a checksum of the state of torch's default generator."""
    return zlib.crc32(torch.get_rng_state().numpy().data)


def batch_sums(batch: Any) -> tuple[float, ...]:
    """Return the sums of a batch's tensors, weighted within a sample, so that a flipped image has another one."""
    dense = [tensor for tensor in find(torch.Tensor, batch) if tensor.layout is torch.strided and tensor.numel()]
    tensors = [one for one in dense if not (one.is_nested or one.is_quantized or one.is_complex())]
    summed = [tensor for tensor in tensors if tensor.is_floating_point()] or tensors
    # Missing values, such as labels, would make all sums NaN.
    finite = [tensor.detach().double().nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0) for tensor in summed]
    totals = [torch.atleast_1d(tensor).sum(0).flatten() for tensor in finite]  # type: ignore[no-untyped-call]
    return tuple(float(total @ torch.linspace(1, 2, len(total), dtype=torch.float64)) for total in totals)
