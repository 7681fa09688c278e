"""Shards the batches of a loader: rank r gets batches r, r+N, … of the loader's own order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, Sampler

from nano_loop.distributed.loaders.agreed_randomness import AgreedItems, AgreedState
from nano_loop.distributed.loaders.bound_worker import BoundWorker
from nano_loop.distributed.random_states import generators_of, part_ways
from nano_loop.distributed.ranks import Ranks
from nano_loop.intercept.loaders import LoaderChange, Start

Loader = DataLoader[Any]


class _LastServed:
    """How the most recent batch came to the loop."""

    whole_by_mode = False


def served_whole_by_mode() -> bool:
    """Whether the most recent batch is of a loader that is served whole only because every model is in eval mode.

    Gradients were on when its iteration began. Training on such batches, each rank on all of them, is what
    ``setup_dataloaders(loader, shard=True)`` is for.
    """
    return _LastServed.whole_by_mode


def forget_last_served() -> None:
    """Let no batch have been served, as before a run."""
    _LastServed.whole_by_mode = False


class BatchSharding(LoaderChange):
    """Shards one loader's batches, or serves all of them on every rank; chosen anew whenever an iteration starts.

    Parameters
    ----------
    ranks : Ranks
        The ranks among which the batches are divided.
    models : list of torch.nn.Module
        The models of the run, of which more may come; a loader is served whole while all are in eval mode.
    shard : bool or None
        True to shard always, False never; None leaves it to the models' mode, and to whether gradients are on.
    """

    def __init__(self, ranks: Ranks, models: list[nn.Module], shard: bool | None = None) -> None:
        self.ranks = ranks
        self.models = models
        self.shard = shard
        self.last_was_whole = False  # how the most recent batch was served

    def choose(self, shard: bool) -> None:
        """Shard always, or never, from the next iteration on."""
        self.shard = shard
        self.last_was_whole = False

    @property
    def whole(self) -> bool:
        """Whether an iteration that starts now is served whole."""
        if self.shard is not None:
            return not self.shard
        return not torch.is_grad_enabled() or self._evaluating

    @property
    def whole_by_mode(self) -> bool:
        """Whether it is served whole for no other reason than the models' mode."""
        return self.shard is None and torch.is_grad_enabled() and self._evaluating

    def attributes(self, loader: Loader) -> dict[str, Any]:
        """See `LoaderChange.attributes`."""
        found: dict[str, Any] = {}
        if self.ranks.loader_cpus and loader.num_workers:
            found["worker_init_fn"] = BoundWorker(self.ranks.loader_cpus, loader.worker_init_fn)
        if sharded_by_user(loader, self.ranks.size):
            return found
        if isinstance(loader.dataset, IterableDataset):
            return {**found, "in_order": True}  # every rank has to read the same order
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        return {**found, name: _ShardedSampler(self, getattr(loader, name), loader)}

    def iterate(self, loader: Loader, start: Start) -> Iterator[Any]:
        """See `LoaderChange.iterate`."""
        if sharded_by_user(loader, self.ranks.size):
            return _Served(start(), self, whole=False, by_mode=False)
        whole, by_mode = self.whole, self.whole_by_mode
        reads = isinstance(loader.dataset, IterableDataset) and not whole
        iterator = self._read(loader, start) if reads else start()
        return _Served(iterator, self, whole, by_mode)

    def length(self, loader: Loader, length: int) -> int:
        """Return the batches of an iteration that starts now, or of the last one where that was whole.

        The latter is for a metric over the whole loader, which is often divided by its length when the model has been
        put back to train mode and gradients are on again.
        """
        whole = self.whole or self.last_was_whole
        return length if whole or sharded_by_user(loader, self.ranks.size) else -(-length // self.ranks.size)

    @property
    def _evaluating(self) -> bool:
        return bool(self.models) and not any(model.training for model in self.models)

    def _read(self, loader: Loader, start: Start) -> Iterator[Any]:
        """Let every rank read the batches of an `IterableDataset` from the same random state, and keep its own."""
        part_ways(self.ranks)
        state = AgreedState(self.ranks, generators_of(loader, loader.dataset))
        state.agree()
        batches = state.call(start)

        def take(count: int) -> list[Any]:
            several = itertools.islice(batches, count)
            return list(several) if loader.num_workers else state.call(list, several)

        return sharded(take, self.ranks.rank, self.ranks.size)


class _ShardedSampler(Sampler[Any]):
    """Replaces a loader's sampler or batch sampler."""

    def __init__(self, sharding: BatchSharding, sampler: Any, loader: Loader) -> None:
        self._sharding = sharding
        self._sampler = sampler
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        ranks = self._sharding.ranks
        if self._sharding.whole:
            return iter(self._sampler)  # with no other rank: one alone may evaluate
        part_ways(ranks)
        return sharded(AgreedItems(self._sampler, ranks, self._loader).take, ranks.rank, ranks.size)

    def __len__(self) -> int:  # of torch's own iterator
        return self._sharding.length(self._loader, len(self._sampler))


class _Served(Iterator[Any]):
    """Iterates over a loader's iterator, and notes how its batches are served."""

    def __init__(self, iterator: Iterator[Any], sharding: BatchSharding, whole: bool, by_mode: bool) -> None:
        self._iterator = iterator
        self._sharding = sharding
        self._whole = whole
        self._by_mode = by_mode

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._sharding.last_was_whole = self._whole
        _LastServed.whole_by_mode = self._by_mode
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]


def sharded_by_user(loader: Loader, size: int) -> bool:
    """Whether a loader shards its batches among `size` ranks by itself, as with a `DistributedSampler`."""
    if isinstance(loader.dataset, IterDataPipe):
        return True  # torch shards data pipes by itself
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return any(getattr(each, "num_replicas", None) == size and hasattr(each, "rank") for each in samplers)


def sharded(take: Callable[[int], list[Any]], rank: int, size: int) -> Iterator[Any]:
    """Yield every `size`-th item, from the `rank`-th on, and as many of them on every rank.

    The last group is filled up from the first items. A group is taken whole before its item is yielded, so what the
    loop changes in a sampler in between counts for the same items on every rank.

    Parameters
    ----------
    take : callable
        Is given a number, and returns so many of the next items, or fewer at the end.
    rank, size : int
        This rank, and how many there are.
    """
    first: list[Any] | None = None
    while group := take(size):
        if first is None:
            first = group[:rank]  # the most that this rank can lack
        item = group[rank] if rank < len(group) else first[(rank - len(group)) % len(first)]
        last = len(group) < size
        del group  # the items may be batches, of which no more are kept than needed
        yield item
        if last:
            return
