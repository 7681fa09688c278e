"""Fetches a batch from an in-memory dataset with one indexing operation (see `nano_loop.data.whole_batches`).

Samples of other datasets are collated by `nano_loop.data.whole_batches`.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, default_collate
from typing_extensions import override

from nano_loop.data.collate import collate
from nano_loop.data.whole_batches import WholeBatches, is_supported, leaves_of
from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.loaders import LoaderChange, changed
from nano_loop.patching.torch_private_loaders import collates_as_torch
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SkipReason, Step

#: The report line of loaders that do not fetch whole batches.
ONE_BY_ONE = "are fetched one by one"


class FastFetch(Step):
    """Iterates over a private copy of each loader, which fetches whole batches or stacks arrays of samples at once.

    The copy shares the loader's samplers and generator, so the order, the random numbers and `len` do not change.
    """

    name = "fast_fetch"
    needs = "loaders"

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        return SkipReason.of_all([_refusal(loader) for loader in parts.loaders])

    @override
    def apply(self, parts: TrainingObjects) -> str:
        refusals = [_refusal(loader) for loader in parts.loaders]
        details = []
        for loader, refusal in zip(parts.loaders, refusals, strict=True):
            if refusal is None:
                undone_with(loader, self.undoing).enter_context(changed(loader, _FETCHING))
            details.append(refusal.detail if refusal else _single_samples(loader))
        is_whole = any(detail is None for detail in details)
        count = f"{refusals.count(None)} of {len(refusals)} loaders"
        words = f"whole batches sliced from memory, {count}" if is_whole else count
        return "; ".join([words, *filter(None, dict.fromkeys(details))])


class _Fetching(LoaderChange):
    """Fetches whole batches instead of samples. The samplers stay the loader's, since indices keep their meaning."""

    def attributes(self, loader: DataLoader[Any]) -> dict[str, Any]:
        # The loop may set another collate_fn or another number of workers on the loader.
        if _refusal(loader):
            return {}
        if _single_samples(loader):
            return {"collate_fn": collate}
        return {"dataset": WholeBatches(loader.dataset), "collate_fn": _as_it_is}


_FETCHING = _Fetching()


def _as_it_is(batch: Any) -> Any:
    return batch


def _refusal(loader: DataLoader[Any]) -> SkipReason | None:
    if loader.collate_fn is not default_collate:
        return SkipReason("collate_fn", "the loader has its own collate_fn")
    if loader.num_workers:
        return SkipReason("workers", f"the loader has {loader.num_workers} workers")
    return None


def _single_samples(loader: DataLoader[Any]) -> str | None:
    """Return why samples are fetched one by one, or None if whole batches are fetched."""
    if not collates_as_torch():
        return f"samples {ONE_BY_ONE}, because the program has registered a function with torch's collate"
    leaves = [*leaves_of(loader.dataset)]
    others = dict.fromkeys(type(leaf).__name__ for leaf in leaves if not is_supported(leaf))
    if others or not leaves:
        return f"samples of {', '.join(others) or 'nothing'} {ONE_BY_ONE}, with their arrays stacked in one call"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"samples {ONE_BY_ONE}, because the loader has its own batch sampler"
    return None
