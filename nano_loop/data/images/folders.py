"""Datasets of image folders, and their loaders: a private copy of the loader fetches through the cache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from nano_loop.data.images.pipelines import Plan, compositions, plan_of
from nano_loop.data.images.store import Store
from nano_loop.patching.attributes import has_own
from nano_loop.patching.loaders import LoaderChange

if TYPE_CHECKING:
    from nano_loop.data.images.reading import Reading


class CachedImages(LoaderChange):
    """Fetches through the cache, with the same pixels if `exact`."""

    def __init__(self, store: Store, exact: bool) -> None:
        self._store = store
        self._exact = exact

    def attributes(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """See `LoaderChange.attributes`."""
        if refusal(loader):
            return {}
        from nano_loop.data.images.batches import collate  # imports Pillow, as `reading` does
        from nano_loop.data.images.reading import Reading

        is_batched = loader.collate_fn is default_collate and loader.batch_sampler is not None
        dataset = CachedDataset(loader.dataset, Reading(self._store, self._exact, is_batched))
        return {"dataset": dataset, **({"collate_fn": collate} if is_batched else {})}


class CachedDataset(Dataset[Any]):
    """A dataset whose images are read through the cache. Its attributes are those of the user's dataset."""

    def __init__(self, dataset: Any, reading: Reading) -> None:
        vars(self).update(_dataset=dataset, _reading=reading)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Checked on a worker's `get_worker_info().dataset`.
        return type(vars(self)["_dataset"]) if "_dataset" in vars(self) else CachedDataset

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in vars(self):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_dataset"], name, value)

    def __reduce__(self) -> Any:
        return CachedDataset, (*vars(self).values(),)

    def __len__(self) -> int:
        return len(vars(self)["_dataset"])

    def __getitem__(self, index: Any) -> Any:
        return _reader(*vars(self).values())[index]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        # The loop may change the attributes of datasets and transforms, so they are read again for each batch.
        reader = _reader(*vars(self).values())
        return [reader[index] for index in indices]


class _Reader:
    """A stand-in for the dataset in calls of its class's ``__getitem__``, with some attributes replaced."""

    def __init__(self, _dataset: Any, **attributes: Any) -> None:
        vars(self).update(attributes, _dataset=_dataset)

    def __getitem__(self, index: Any) -> Any:
        return type(self._dataset).__getitem__(self, index)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


def _reader(dataset: Any, reading: Reading) -> Any:
    """Return a reader of a dataset's items. The ``loader`` of a folder returns the path, and ``transform`` reads it."""
    if type(dataset) is Subset:
        return _Reader(dataset, dataset=_reader(dataset.dataset, reading))
    if type(dataset) is ConcatDataset:
        return _Reader(dataset, datasets=[_reader(part, reading) for part in dataset.datasets])
    plan = _plan(dataset)
    if plan is None:
        return dataset
    transform = functools.partial(reading.image, load=dataset.loader, plan=plan)
    return _Reader(dataset, loader=lambda path: path, transform=transform)


def datasets_in(dataset: Any) -> list[Any]:
    """Return the datasets that a dataset is composed of."""
    if type(dataset) is Subset:
        return datasets_in(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [inner for part in dataset.datasets for inner in datasets_in(part)]
    return [dataset]


def plans_in(dataset: Any) -> list[Plan]:
    """Return the plans of the pipelines in a dataset."""
    return [plan for inner in datasets_in(dataset) if (plan := _plan(inner)) is not None]


def has_images(dataset: Any) -> bool:
    """Whether a dataset contains a dataset or a pipeline of torchvision."""
    return any(
        type(inner).__module__.startswith("torchvision.") or plan_of(getattr(inner, "transform", None)) is not None
        for inner in datasets_in(dataset)
    )


def refusal(loader: DataLoader[Any]) -> str | None:
    """Return why a loader is not changed, or None."""
    if not compositions():
        return "torchvision is not imported"
    others = [inner for inner in datasets_in(loader.dataset) if _plan(inner) is None]
    if not others:
        return None
    if _is_folder(others[0]):
        return "the transform of the dataset is not a pipeline of torchvision"
    return f"the dataset, a {type(others[0]).__name__}, is not an ImageFolder whose files Pillow reads"


def _plan(dataset: Any) -> Plan | None:
    """Return the plan of an image folder's pipeline, or None for other datasets."""
    return plan_of(dataset.transform) if _is_folder(dataset) else None


def _is_folder(dataset: Any) -> bool:
    """Whether only torchvision's code creates the items of a dataset, from a file that Pillow reads and a transform."""
    module = sys.modules.get("torchvision.datasets.folder")
    if module is None or not isinstance(dataset, module.DatasetFolder):
        return False
    kind: Any = type(dataset)
    return (
        kind.__getitem__ is module.DatasetFolder.__getitem__
        and has_own(kind, "__getitem__")
        and not hasattr(kind, "__getitems__")
        and dataset.loader in (module.default_loader, module.pil_loader)
        and sys.modules["torchvision"].get_image_backend() == "PIL"
    )
