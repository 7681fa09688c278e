"""Shards the batches of a loader: rank r gets batches r, r+N, … of the loader's own order.

If every rank evaluates all batches, torchmetrics must not combine their metrics; see `whole_evaluations_not_joined`.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from nano_loop.data.random_states import diverge_rng, generators_of
from nano_loop.data.workers import BoundWorker
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.sharding.dataset_digest import Digest
from nano_loop.distributed.sharding.own_shares import OwnShares, Source
from nano_loop.distributed.sharding.shared_sampler_rng import AgreedItems, AgreedState
from nano_loop.patching.attributes import replaced
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.loaders import ClassIteration, LoaderChange, Start
from nano_loop.patching.patch_table import listening, value_in_force

Loader = DataLoader[Any]


class _ThreadDepth(threading.local):
    """Counts the nested ``with`` bodies that this thread is in; 0 outside of all."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


#: Entered while a loader fetches a batch: loaders that the dataset itself iterates then are not the loop's.
serving = _ThreadDepth()


class BatchSharding(LoaderChange):
    """Shards one loader's batches, or serves all of them on every rank; decided at the start of each iteration.

    While all `models` are in eval mode, every rank gets all batches, unless `shard` is True or False. With None, it
    also depends on whether gradients are enabled. `number` is that of the loader among those set up, from 1; 0 for
    others.
    """

    splits = False  # whether each batch is divided, rather than the sequence of batches

    def __init__(
        self,
        ranks: Ranks,
        models: Collection[nn.Module],
        shard: bool | None = None,
        *,
        known: Any = None,
        number: int = 0,
    ) -> None:
        self.ranks = ranks
        self.models = models
        self.shard = shard
        self.own_shares = OwnShares(ranks, WeakIdKeyDictionary() if known is None else known, number)
        self.number = number
        self.last_was_whole: bool | None = None  # whether all ranks got the most recent batch

    def choose(self, shard: bool) -> None:
        """Set whether to always or never shard, from the next iteration on."""
        self.shard = shard
        self.last_was_whole = None

    @property
    def whole(self) -> bool:
        """Whether every rank would get all batches in an iteration that starts now."""
        if self.shard is not None:
            return not self.shard
        return not torch.is_grad_enabled() or self._evaluating

    def attributes(self, loader: Loader) -> dict[str, Any]:
        """See `LoaderChange.attributes`."""
        attributes: dict[str, Any] = {}
        if self.ranks.loader_cpus and loader.num_workers:
            attributes["worker_init_fn"] = BoundWorker(self.ranks.loader_cpus, loader.worker_init_fn)
        if by_user := sharding_samplers(loader, self.ranks.size):
            for sampler in by_user:
                with suppress(AttributeError):  # it may be a property
                    sampler.rank = self.ranks.rank  # in workers, an argument is a copy of rank 0's
            return attributes
        if isinstance(loader.dataset, IterableDataset):
            return {**attributes, "in_order": True}  # every rank must read the same order
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        return {**attributes, name: ShardedSampler(self, sampler, generators_of(sampler, loader), Source.of(loader))}

    def iterate(self, loader: Loader, start: Start) -> Iterator[Any]:
        """See `LoaderChange.iterate`."""
        if sharding_samplers(loader, self.ranks.size):
            return Served(start(), self, whole=False)
        whole = self.whole
        reads = isinstance(loader.dataset, IterableDataset) and not whole
        return self._serve(self._read(loader, start) if reads else start(), whole)

    def iterate_class(self, loader: Loader, iteration: ClassIteration) -> Iterator[Any]:
        """See `LoaderChange.iterate_class`."""
        if sharding_samplers(loader, self.ranks.size):
            return iteration.start()
        if self.whole:
            return self._serve(iter(iteration.start()), whole=True)
        return self._divide_class(loader, iteration)

    def length(self, loader: Loader, length: int) -> int:
        """Return the batches of the last iteration, by which loops divide sums; before it, of one started now."""
        whole = self.whole if self.last_was_whole is None else self.last_was_whole
        return length if whole or sharding_samplers(loader, self.ranks.size) else self.share_of(length)

    def share_of(self, length: int) -> int:
        """Return this rank's number of batches, out of `length`."""
        return max(length, self.own_shares.steps) if self.own_shares.apart else -(-length // self.ranks.size)

    def divide(self, take: Callable[[int], list[Any]], source: Source) -> Iterator[Any]:
        """Yield every N-th item for N ranks, starting with this rank's number, equally many on every rank.

        The last group is filled up with the first items. A group is read before its item is yielded, so changes that
        the loop makes to a sampler in between apply to the same items on every rank.
        """
        rank, size = self.ranks.rank, self.ranks.size
        group = take(size)
        samples = self.own_shares.compare(group, source)
        if self.own_shares.apart:
            groups = itertools.chain([group], iter(lambda: take(1), []))
            del group  # items may be large batches, so do not keep them
            yield from self.own_shares.take_all(itertools.chain.from_iterable(groups), source, samples)
            return
        self.ranks.context.sharding.implicit_loaders |= not self.number
        first = group[:rank]  # the most that this rank can lack
        while group:
            item = group[rank] if rank < len(group) else first[(rank - len(group)) % len(first)]
            is_last = len(group) < size
            del group
            yield item
            group = [] if is_last else take(size)

    def _serve(self, iterator: Iterator[Any], whole: bool) -> Iterator[Any]:
        return Served(iterator, self, whole)

    @property
    def _evaluating(self) -> bool:
        return bool(self.models) and not any(model.training for model in self.models)

    def _read(self, loader: Loader, start: Start) -> Iterator[Any]:
        """Let every rank read the batches of an `IterableDataset` from the same random state, and keep its own."""
        state = self._agreed_state(loader)
        batches = state.call(start)

        def take(count: int) -> list[Any]:
            several = itertools.islice(batches, count)
            return list(several) if loader.num_workers else state.call(list, several)

        return self.divide(take, Source.of(loader))

    def _divide_class(self, loader: Loader, iteration: ClassIteration) -> Iterator[Any]:
        """Read all batches of a class with its own iteration, and keep this rank's, unless already divided."""
        state = self._agreed_state(loader)
        batches = iteration.whole()
        first: list[Any] = state.call(list, itertools.islice(batches, 1))
        rest: Iterator[Any] = itertools.chain(first, batches)
        if not iteration.proxy.was_iterated:
            whole = rest
            rest = self.divide(lambda n: [*itertools.islice(whole, n)], Source.of(loader))
        yield from rest if iteration.proxy.was_iterated and not self.splits else self._serve(rest, whole=False)

    def _agreed_state(self, loader: Loader) -> AgreedState:
        diverge_rng(self.ranks)
        state = AgreedState(self.ranks, generators_of(loader, loader.dataset))
        state.agree()
        return state


class ShardedSampler(Sampler[Any]):
    """Replaces a loader's sampler or batch sampler."""

    def __init__(self, sharding: BatchSharding, sampler: Any, generators: list[Any], source: Source) -> None:
        self._sharding = sharding
        self._sampler = sampler
        self._generators = generators  # not the loader, which would then live as long as its copy
        self._source = source
        self._whole = False

    def __iter__(self) -> Iterator[Any]:
        ranks = self._sharding.ranks
        self._whole = self._sharding.whole
        if self._whole:
            return iter(self._sampler)  # without communication: this rank may evaluate alone
        diverge_rng(ranks)
        source = self._source
        with suppress(TypeError, NotImplementedError):  # an endless sampler has no length
            source = source._replace(length=len(self._sampler))
        return self._sharding.divide(AgreedItems(self._sampler, ranks, self._generators).take, source)

    def __len__(self) -> int:  # called by torch's own iterator
        return len(self._sampler) if self._whole else self._sharding.share_of(len(self._sampler))


class Served(Iterator[Any]):
    """Iterates over a loader's iterator, and records how its batches are served."""

    def __init__(self, iterator: Iterator[Any], sharding: BatchSharding, whole: bool) -> None:
        self._iterator = iterator
        self._sharding = sharding
        self._whole = whole

    def __next__(self) -> Any:
        with serving:
            batch = next(self._iterator)
        self._sharding.last_was_whole = self._sharding.ranks.context.sharding.whole = self._whole
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]


def sharding_samplers(loader: Loader, size: int) -> list[Any]:
    """Return the samplers by which a loader itself shards its batches among `size` ranks, as `DistributedSampler`."""
    batch_sampler = getattr(loader, "batch_sampler", None)  # missing while a loader is constructed
    samplers = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [one for one in samplers if getattr(one, "num_replicas", None) == size and hasattr(one, "rank")]


@contextmanager
def whole_evaluations_not_joined(ranks: Ranks) -> Iterator[None]:
    """In the body, let torchmetrics not combine metrics of batches that all ranks got: samples would count N times."""
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    if metric is None:
        yield
        return
    with replaced(metric, "sync", _synchronized), listening(_synchronized, ranks):
        yield


def _synchronized(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def sync(self: Any, *args: Any, should_sync: bool = True, **kwargs: Any) -> None:
        ranks: Ranks = value_in_force(_synchronized)[-1]
        may_be_whole = should_sync and ranks.context.sharding.whole
        if not may_be_whole or len(set(ranks.gather(Digest(self.metric_state).crc))) > 1:
            original(self, *args, should_sync=should_sync, **kwargs)

    return sync
