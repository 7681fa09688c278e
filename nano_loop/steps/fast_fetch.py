"""Fetches a batch from an in-memory dataset with one indexing operation (see `nano_loop.data.whole_batches`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate
from typing_extensions import override

from nano_loop.data.whole_batches import WholeBatches, is_supported, leaves_of
from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.objects.loaders import LoaderChange, changed
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SkipReason, Step


class FastFetch(Step):
    """Iterates over a private copy of each loader, which fetches whole batches.

    The copy shares the loader's samplers and generator and uses torch's own iterator, so the order, the random numbers
    and `len` do not change. The loader keeps its class, its dataset and its `collate_fn`.
    """

    name = "fast_fetch"
    needs = "loaders"

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        return SkipReason.of_all([_refusal(loader) for loader in parts.loaders])

    @override
    def apply(self, parts: TrainingObjects) -> str:
        refusals = [_refusal(loader) for loader in parts.loaders]
        for loader, refusal in zip(parts.loaders, refusals, strict=True):
            if refusal is None:
                undone_with(loader, self.undoing).enter_context(changed(loader, _FETCHING))
        reasons = dict.fromkeys(refusal.detail for refusal in refusals if refusal is not None)
        return "; ".join([f"{refusals.count(None)} of {len(refusals)} loaders", *reasons])


class _Fetching(LoaderChange):
    """Fetches whole batches instead of samples. The samplers are the loader's, since indices keep their meaning."""

    def attributes(self, loader: DataLoader[Any]) -> dict[str, Any]:
        # The loop may set another collate_fn or another number of workers on the loader.
        if _refusal(loader):
            return {}
        return {"dataset": WholeBatches(loader.dataset), "collate_fn": _as_it_is}


_FETCHING = _Fetching()


def _as_it_is(batch: Any) -> Any:
    return batch


def _refusal(loader: DataLoader[Any]) -> SkipReason | None:
    leaves = [*leaves_of(loader.dataset)]
    if any(type(leaf) is torch.Tensor and leaf.layout is not torch.strided for leaf in leaves):
        return SkipReason("sparse", "the dataset holds sparse tensors")
    others = dict.fromkeys(type(leaf).__name__ for leaf in leaves if not is_supported(leaf))
    if others or not leaves:
        only = "whole batches come from tensors and arrays in datasets of torch and of skorch"
        return SkipReason("no_tensors", f"samples come from {', '.join(others) or 'nothing'}; {only}")
    if loader.collate_fn is not default_collate:
        return SkipReason("collate_fn", "the loader has its own collate_fn")
    if loader.num_workers:
        return SkipReason("workers", f"the loader has {loader.num_workers} workers")
    if type(loader.batch_sampler) is not BatchSampler:
        return SkipReason("batch_sampler", "the loader has its own batch sampler, or none")
    return None
