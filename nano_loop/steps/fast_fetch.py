"""Fetches a batch from an in-memory dataset with one indexing operation.

A `DataLoader` over a `TensorDataset`, or over a tensor, indexes each sample separately and stacks the samples. Indexing
the tensors with the whole batch returns the same tensors in a sixth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset, default_collate
from typing_extensions import override

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
        fitting = [loader for loader in parts.loaders if not _refusal(loader)]
        for loader in fitting:
            undone_with(loader, self.undoing).enter_context(changed(loader, _FETCHING))
        return f"{len(fitting)} of {len(parts.loaders)} loaders"


class _WholeBatches(Dataset[Any]):
    """The tensors of a dataset, indexed by a whole batch of positions."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, positions: list[int]) -> list[torch.Tensor] | torch.Tensor:
        dataset: Any = self.dataset
        while isinstance(dataset, Subset):
            positions = [dataset.indices[position] for position in positions]
            dataset = dataset.dataset
        index = _index(positions)
        batch = [_rows(tensor, index) for tensor in _tensors(dataset)]
        return batch[0] if isinstance(dataset, torch.Tensor) else batch


class _Fetching(LoaderChange):
    """Fetches whole batches instead of samples. The samplers are the loader's, since indices keep their meaning."""

    def attributes(self, loader: DataLoader[Any]) -> dict[str, Any]:
        # The loop may set another collate_fn or another number of workers on the loader.
        if _refusal(loader):
            return {}
        return {"dataset": _WholeBatches(loader.dataset), "collate_fn": _as_it_is}


_FETCHING = _Fetching()


def _as_it_is(batch: Any) -> Any:
    return batch


def _index(positions: list[int]) -> torch.Tensor:
    """Return the positions as a tensor, which numpy makes of plain ints in a third of torch's time."""
    if positions and type(positions[0]) is int:
        return torch.from_numpy(np.fromiter(positions, np.int64, len(positions)))
    return torch.as_tensor(positions, dtype=torch.long)


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor at these positions, in the layout that `torch.stack` returns."""
    try:
        rows = tensor.index_select(0, index)
    except (IndexError, RuntimeError):  # IPEX's is a RuntimeError
        # A negative position counts from the end. What is out of range gets the usual error.
        rows = tensor[index]
    return rows.contiguous()


def _tensors(dataset: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of a dataset that is a `TensorDataset` or itself a tensor, or an empty tuple.

    A subclass of tensors may have its own rows.
    """
    tensors = dataset.tensors if type(dataset) is TensorDataset else (dataset,)
    return tensors if all(type(tensor) is torch.Tensor and tensor.dim() for tensor in tensors) else ()


def _refusal(loader: DataLoader[Any]) -> SkipReason | None:
    dataset: Any = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    tensors = _tensors(dataset)
    if not tensors:
        kind = type(dataset).__name__
        only = "whole batches come from a TensorDataset or a tensor only"
        return SkipReason("no_tensors", f"the dataset is a {kind}; {only}")
    if loader.collate_fn is not default_collate:
        return SkipReason("collate_fn", "the loader has its own collate_fn")
    if loader.num_workers:
        return SkipReason("workers", f"the loader has {loader.num_workers} workers")
    if type(loader.batch_sampler) is not BatchSampler:
        return SkipReason("batch_sampler", "the loader has its own batch sampler, or none")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return SkipReason("sparse", "the dataset holds sparse tensors")
    return None
