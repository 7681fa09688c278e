"""Fetches the batches of a loader in as many worker processes as the option says."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.objects.loaders import LoaderChange, changed
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SkipReason, Step

_PREFETCHED = 2  # batches a worker, as torch has it where the user does not say


class LoaderWorkers(Step):
    """Iterates over a private copy of each loader, with another ``num_workers``.

    The order of the samples stays the same. What a dataset draws by itself, as for augmentation, is drawn in other
    processes, from other random states. Workers pay where decoding takes a large part of a step, and there is a core
    for them.
    """

    name = "loader_workers"
    needs = "loaders"

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if all(isinstance(loader.dataset, IterableDataset) for loader in parts.loaders):
            detail = "workers of an iterable dataset would each read all of it, unless it divides itself"
            return SkipReason("iterable_dataset", detail)
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        count = self.options.loader_workers or 0
        fitting = [loader for loader in parts.loaders if not isinstance(loader.dataset, IterableDataset)]
        for loader in fitting:
            undone_with(loader, self.undoing).enter_context(changed(loader, _Workers(count)))
        return f"{count} for {len(fitting)} of {len(parts.loaders)} loaders"


class _Workers(LoaderChange):
    """Overrides the number of workers, and what torch allows with workers alone."""

    def __init__(self, count: int) -> None:
        self._count = count

    @override
    def attributes(self, loader: DataLoader[Any]) -> dict[str, Any]:
        if self._count == loader.num_workers:
            return {}
        attributes: dict[str, Any] = {"num_workers": self._count}
        if not self._count:
            return {**attributes, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        if loader.prefetch_factor is None:
            attributes["prefetch_factor"] = _PREFETCHED
        return attributes
