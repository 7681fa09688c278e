"""Splits each batch of a loader among the ranks, with the same order, length and number of steps as one process.

Samples that torch's own collate function stacks are selected by index, so that each is only loaded by its rank. With
other functions, a sample may depend on the rest of the batch: padding to the longest, negative pairs. So every rank
loads these batches completely and extracts its part, and likewise for an `IterableDataset`, for loaders without a batch
sampler, and for classes with their own `__iter__`.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, Sampler, Subset, default_collate

from nano_loop.data.random_states import checksum_of_libraries, process_states, reseed, set_process_states
from nano_loop.data.whole_batches import is_supported, leaves_of
from nano_loop.distributed.comm.split_batches import Share, SplitBatches
from nano_loop.distributed.sharding.batch_parts import BatchParts
from nano_loop.distributed.sharding.own_shares import Source
from nano_loop.distributed.sharding.sharding import BatchSharding, Loader, Served, sharding_samplers
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.loaders import ClassIteration, Start
from nano_loop.patching.torch_private_loaders import collates_as_torch

_ALL = "split_batches divides each batch of the whole data set among the ranks"
_UNDIVIDED = "Give every rank all data: omit samplers and subsets by rank, or omit split_batches"


class BatchSplitting(BatchSharding):
    """Splits one loader's batches, or serves complete batches on every rank, as `BatchSharding` chooses."""

    splits = True

    def __init__(self, split: SplitBatches, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.split = split
        self.parts = BatchParts(self.ranks.rank, self.ranks.size)
        # Of index batches in flight in the latest iteration, with checksums of their indices.
        self.shares: deque[tuple[Share, int]] | None = None
        self._states: list[Any] | None = None  # random states for loading samples in the loop's process
        self._loops_states: list[Any] | None = None  # the loop's random states while samples are loaded
        self._by_class: ClassIteration | None = None

    def attributes(self, loader: Loader) -> dict[str, Any]:
        """See `LoaderChange.attributes`."""
        attributes = super().attributes(loader)
        if sharding_samplers(loader, self.ranks.size):
            return attributes
        attributes["in_order"] = True
        if splits_indices(loader):
            # Indexing tensors draws nothing, and saving the random states takes longer than loading such a batch.
            draws = not (loader.num_workers or all(map(is_supported, leaves_of(loader.dataset))))
            attributes["batch_sampler"] = _OwnIndices(self, attributes["batch_sampler"], draws=draws)
        elif loader.batch_sampler is not None and not self._in_class:
            attributes["collate_fn"] = partial(_counted, loader.collate_fn)
        return attributes

    def iterate(self, loader: Loader, start: Start) -> Iterator[Any]:
        """See `LoaderChange.iterate`."""
        if sharding_samplers(loader, self.ranks.size) and not self.whole:
            self._refuse(f"a loader whose sampler divides it among {self.ranks.size} ranks")
        self.shares = deque() if splits_indices(loader) and not (self.whole or self._in_class) else None
        with self.split.loading():  # torch draws a seed for workers
            return super().iterate(loader, start)

    def iterate_class(self, loader: Loader, iteration: ClassIteration) -> Iterator[Any]:
        """See `LoaderChange.iterate_class`. A class may read ahead, so the batches that it yields are split."""
        self._by_class, self.shares = iteration, None
        return super().iterate_class(loader, iteration)

    def share_of(self, length: int) -> int:
        """Return the number of all batches: each rank takes its part of every batch."""
        return length

    def divide(self, take: Callable[[int], list[Any]], source: Source) -> Iterator[Any]:
        """Yield every item, in the order of rank 0; raise a `NanoError` if the program has divided the data by rank."""
        items = take(1)
        self.own_shares.compare(items, source)
        if self.own_shares.apart:
            self._refuse(f"different samples of {source.name} on each rank")
        self.ranks.context.sharding.implicit_loaders |= not self.number
        while items:
            yield items.pop()
            items = take(1)

    def begin_loading(self) -> None:
        """Save the loop's random states: samples differ by rank and may draw, but the loops must agree."""
        self._loops_states = process_states()
        if self._states is None:
            reseed(self.ranks.rank)
        else:
            set_process_states(self._states, [True] * len(self._states))

    def end_loading(self) -> None:
        """Restore the loop's random states if they were saved."""
        if self._loops_states is not None:
            self._states = process_states()
            set_process_states(self._loops_states, [True] * len(self._loops_states))
            self._loops_states = None

    @property
    def _in_class(self) -> bool:
        """Whether code of the loader's class is running, which must see complete batches."""
        return self._by_class is not None and self._by_class.proxy.reading

    def _serve(self, iterator: Iterator[Any], whole: bool) -> Iterator[Any]:
        return super()._serve(iterator, whole) if self._in_class else _Split(iterator, self, whole)

    def _refuse(self, got: str) -> None:
        raise NanoError(error_message(got, _ALL, _UNDIVIDED))


class _Split(Served):
    """Extracts this rank's part of each batch for the loop, and records its share."""

    def __init__(self, iterator: Iterator[Any], splitting: BatchSplitting, whole: bool) -> None:
        super().__init__(iterator, splitting, whole)
        self._splitting, self._shares = splitting, splitting.shares

    def __next__(self) -> Any:
        split, total = self._splitting.split, None
        with split.loading():
            try:
                batch = super().__next__()
            finally:
                self._splitting.end_loading()
        if isinstance(batch, _Counted):
            total, batch = batch
        if self._whole:
            if torch.is_grad_enabled():  # otherwise the previous share stays
                split.deliver_whole(self)
                if self._splitting.shard is False:
                    split.deliver(self, None)
            return batch
        if not split.is_here:
            expected = "with split_batches, a batch belongs to the next backward in the loop's thread"
            hint = "Iterate it in the thread that trains; num_workers loads ahead"
            raise NanoError(error_message("a loader that another thread iterates", expected, hint))
        checksum = 0
        if self._shares is None:
            share, batch = self._splitting.parts.part(batch, total)
        else:
            share, checksum = self._shares.popleft()
        split.deliver(self, share, batch, checksum)
        if split.is_checked:
            split.libraries = checksum_of_libraries()
        return batch


class _OwnIndices(Sampler[Any]):
    """Yields this rank's indices of each batch, and records the share."""

    def __init__(self, splitting: BatchSplitting, sampler: Any, *, draws: bool) -> None:
        self._splitting, self._sampler, self._draws = splitting, sampler, draws

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._sampler)
        shares = self._splitting.shares
        return batches if shares is None else self._own(batches, shares)

    def __len__(self) -> int:
        return len(self._sampler)

    def _own(self, batches: Iterator[Any], shares: deque[tuple[Share, int]]) -> Iterator[Any]:
        ranks = self._splitting.ranks
        for batch in batches:
            indices = [*batch]
            share = Share.of(len(indices), ranks.rank, ranks.size)
            shares.append((share, _checksum(indices)))
            if self._draws:  # random numbers, in this process
                self._splitting.begin_loading()
            yield indices[share.start : share.stop]


def _checksum(indices: list[Any]) -> int:
    """Return a checksum of indices that are integers, and 0 of others, such as keys."""
    try:
        return zlib.crc32(array("q", indices).tobytes())
    except (TypeError, OverflowError):
        return 0


class _Counted(NamedTuple):
    """A batch and its number of samples."""

    total: int
    batch: Any


def _counted(collate: Callable[[Any], Any], samples: Any) -> _Counted:
    return _Counted(len(samples), collate(samples))


def splits_indices(loader: Loader) -> bool:
    """Whether batches can be split by index: samples are stacked, or are PyG graphs."""
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if loader.batch_sampler is None or isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitems__"):
        return False  # a function of several samples may pad them to the longest
    if type(loader.collate_fn).__module__.startswith("torch_geometric."):
        return True
    return loader.collate_fn is default_collate and collates_as_torch()
