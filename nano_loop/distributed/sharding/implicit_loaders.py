"""Shards the loaders that the loop makes, or uses without passing them to ``setup``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nano_loop.distributed.comm.channel import ITERATION
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.sharding.dataset_digest import Digest, Known
from nano_loop.distributed.sharding.sharding import BatchSharding, sharded, sharded_by_user
from nano_loop.patching.objects.loaders import Start


class ImplicitSharding(BatchSharding):
    """Shards a loader if all ranks have the same one.

    Parameters
    ----------
    ranks, models
        See `BatchSharding`.
    known : Known
        What the ranks of this run have found to be alike, in all of its loaders.

    Notes
    -----
    The loop may have divided the data itself, as by ``Subset(data, range(rank, len(data), size))``, by a sampler that
    knows its rank, or by an `IterableDataset` that skips what is for others. To divide such data again would lose a
    part. So the ranks compare their loaders, and then the first items that these yield. Where something differs, each
    rank takes all that it has.
    """

    def __init__(self, ranks: Ranks, models: Collection[nn.Module], known: Known) -> None:
        super().__init__(ranks, models)
        self._known = known
        self._compared = False

    def iterate(self, loader: DataLoader[Any], start: Start) -> Iterator[Any]:
        """See `LoaderChange.iterate`."""
        if not self._compared and not self.whole and not sharded_by_user(loader, self.ranks.size):
            self._compared = True
            held = () if isinstance(loader.dataset, IterableDataset) else (loader.dataset, loader.batch_size)
            compared = Digest(*held, known=self._known)
            self._compare(compared)
            if not self.apart:
                self._known.add(compared.seen.values())
        return super().iterate(loader, start)

    def divide(self, take: Callable[[int], list[Any]]) -> Iterator[Any]:
        """See `BatchSharding.divide`."""
        ahead = [take(self.ranks.size)]
        self._compare(Digest(ahead))
        if self.apart:
            groups = itertools.chain(ahead, iter(lambda: take(self.ranks.size), []))
            yield from itertools.chain.from_iterable(groups)
        else:
            self.ranks.context.sharding.implicit_loaders = True
            yield from sharded(lambda n: ahead.pop() if ahead else take(n), self.ranks.rank, self.ranks.size)

    def _compare(self, digest: Digest) -> None:
        """Find out whether all ranks have the same. Collective."""
        self.apart |= len(set(self.ranks.gather(digest.crc, ITERATION))) > 1
