"""Detects data that the program itself has divided by rank: the ranks compare data before dividing it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from nano_loop.distributed.comm.ranks import ITERATION, Ranks
from nano_loop.distributed.sharding.dataset_digest import Digest
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.user_code import warn_once
from nano_loop.patching.walk import items_of

_FIRST = 64  # items compared one by one
_MOST = 1 << 16  # maximum number of samples of a loader that are compared with other ranks' first ones
_ELEMENTS = 1 << 18  # maximum elements of a tensor among the first items
_ARRAYS = (torch.Tensor, np.ndarray)
_COLUMNS = (*_ARRAYS, list, tuple, dict)
_DRAWN_APART = "data in the same order on all ranks is divided; of this data, each rank takes everything"
_WAYS = (
    "Draw the order from a generator of torch, random or numpy that is the process's or the sampler's own, or give "
    "each rank a part, by nano_loop.global_rank()"
)


class Source(NamedTuple):
    """The source of an iteration's items, which are `batched` or single, and their number on this rank, if known."""

    dataset: Any
    batched: bool
    length: int | None = None

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Source:
        """Return the source of a loader, without a length."""
        return cls(loader.dataset, loader.batch_sampler is not None)

    @property
    def name(self) -> str:
        """The name of the data set, for messages."""
        return type(self.dataset).__qualname__


class OwnShares:
    """Compares the ranks' data of one loader at the start of each iteration.

    The program may have divided the data, by a subset, a sampler or an `IterableDataset`. Dividing it again would lose
    data. Objects that were equal on all ranks are `known` for all loaders of this run: what they have cached since does
    not matter.
    """

    def __init__(self, ranks: Ranks, known: Any, loader: int = 0) -> None:
        self.apart = False  # whether the ranks had different data in the latest iteration
        self.steps = 0  # the items that each rank then takes, if all ranks know their lengths; otherwise 0
        self._ranks = ranks
        self._known = known
        self._loader = loader
        self._looked = 0  # number of samples compared with other ranks' first ones
        self._dataset: int | None = None  # a digest from before any rank has cached anything in it

    def compare(self, ahead: Sequence[Any], source: Source) -> list[list[int]]:
        """Find out whether ranks have different data, and return digests of each rank's first samples. Collective."""
        is_new = self._dataset is None
        if self._dataset is None:
            looked = Digest(None if isinstance(source.dataset, IterableDataset) else source.dataset, known=self._known)
            self._dataset = looked.crc
        dataset = Digest(self._dataset, *_indices(source.dataset)).crc
        items = Digest(ahead, pickled=True, elements=_ELEMENTS).crc
        samples = [*itertools.islice(_digests(ahead, source.batched), _FIRST)]
        by_rank = self._ranks.gather((self._loader, dataset, items, samples, source.length), ITERATION)
        loaders, datasets, _, samples_by_rank, lengths = zip(*by_rank, strict=True)
        if len(set(loaders)) > 1:
            iterated = ", ".join(f"rank {rank} loader {loader}" for rank, loader in enumerate(loaders))
            got = f"the ranks iterate different set-up loaders: {iterated}"
            hint = "Make the loop iterate its loaders in the same order on every rank"
            raise NanoError(error_message(got, "all ranks must iterate the same loaders in the same order", hint))
        self.apart = len({one[:3] for one in by_rank}) > 1
        self.steps = max(lengths) if self.apart and None not in lengths else 0
        if len(set(datasets)) > 1:
            return []
        if is_new:
            for value in looked.seen.values():
                with suppress(TypeError):  # not all objects can be weakly referenced
                    self._known[value] = True
        return [*samples_by_rank]

    def take_all(self, items: Iterator[Any], source: Source, first: list[list[int]]) -> Iterator[Any]:
        """Yield all items of this rank, repeating its first ones if others have more; see `compare` for `first`."""
        shares = self._ranks.context.sharding.own_shares
        shares.setdefault(source.name, False)
        lacking = max(self.steps - (source.length or 0), 0)
        kept: list[Any] = []
        count = 0
        common = [(set(samples), set[int]()) for samples in first[1:] if 1 < len(samples) == len(set(samples))]
        for item in items:
            count += 1
            if len(kept) < lacking:
                kept.append(item)
            if common and self._ranks.rank == 0 and self._looked < _MOST and not shares[source.name]:
                samples = [*_digests([item], source.batched)]
                self._looked += len(samples)
                for others, met in common:
                    met |= others.intersection(samples)
                # Most of the first samples of another rank also occurred on this one.
                shares[source.name] = any(2 * len(met) > len(others) for others, met in common)
                if shares[source.name]:
                    got = f"the {self._ranks.size} ranks have the same samples of {source.name} in different orders"
                    warn_once(error_message(got, _DRAWN_APART, _WAYS))
            yield item
        if kept:
            yield from itertools.islice(itertools.cycle(kept), max(self.steps - count, 0))


def _indices(dataset: Any) -> Iterator[Any]:
    """Yield the indices of subsets, which a program may change for each epoch."""
    while isinstance(dataset, Subset):
        yield dataset.indices
        dataset = dataset.dataset


def _digests(items: Sequence[Any], batched: bool) -> Iterator[int]:
    """Yield digests of the samples in items, or of their indices."""
    for item in items:
        for sample in _samples(item) if batched else [item]:
            yield Digest(sample, pickled=True).crc


def _samples(batch: Any) -> Sequence[Any]:
    """Return the samples of a batch, from its columns or its list; or the batch itself if there are none."""
    columns = [*_columns(batch)]
    counts = {None if column is None else len(column) for column in columns}
    if len(counts) == 1 and None not in counts:
        return [*zip(*columns, strict=True)]
    return batch if isinstance(batch, (list, tuple)) else [batch]


def _columns(value: Any) -> Iterator[Any]:
    """Yield the arrays and lists of a batch, and None for any other values."""
    is_several = isinstance(value, (list, tuple)) and any(isinstance(item, _COLUMNS) for item in value)
    if isinstance(value, dict) or is_several:
        for part in items_of(value):
            yield from _columns(part)
    elif isinstance(value, _ARRAYS):
        yield value if value.ndim else None
    else:
        yield value if isinstance(value, (list, tuple)) else None
