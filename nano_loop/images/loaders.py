"""Loaders of images: a private copy of the loader fetches through the cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from nano_loop.images.pipelines import Plan, compositions, plan_of
from nano_loop.images.store import Store
from nano_loop.patching.objects.loaders import LoaderChange
from nano_loop.patching.torch_private import image_preset
from nano_loop.patching.torch_private_loaders import is_default_collate
from nano_loop.patching.walk import CONTAINERS, items_of, walk

#: torchvision's datasets whose items are ``(self.transform(image), target)``: the image goes into the batch as it is.
_PAIRS = frozenset(
    (
        *("CIFAR10", "CIFAR100", "Caltech101", "Caltech256", "Country211", "DTD", "DatasetFolder", "EMNIST"),
        *("EuroSAT", "FGVCAircraft", "FashionMNIST", "Flowers102", "Food101", "GTSRB", "ImageFolder", "ImageNet"),
        *("Imagenette", "KMNIST", "MNIST", "OxfordIIITPet", "PCAM", "Places365", "RenderedSST2", "SUN397", "SVHN"),
        "StanfordCars",
    )
)


class Images(Dataset[Any]):
    """A dataset whose items are fetched through the cache. Its attributes are those of the user's dataset.

    Parameters
    ----------
    exact : bool
        Whether pixels have to be the same.
    batched : bool
        Whether `collate` makes the batches, so that images may be pending.
    """

    def __init__(self, dataset: Any, store: Store, exact: bool, batched: bool) -> None:
        from nano_loop.images.reading import Reading  # imports Pillow

        deferring = {id(pipeline): pipeline for pipeline in direct_pipelines(dataset)} if batched else {}
        reading = Reading(store, exact, plans_in(dataset)[:4], deferring)
        vars(self).update(_dataset=dataset, _reading=reading, _batched=batched)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # What a worker's `get_worker_info().dataset` is asked for.
        return type(vars(self)["_dataset"]) if "_dataset" in vars(self) else Images

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in vars(self):  # while it is unpickled
            raise AttributeError(name)
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_dataset"], name, value)

    def __reduce__(self) -> Any:
        own = vars(self)
        reading = own["_reading"]
        return Images, (own["_dataset"], reading.store, reading.exact, own["_batched"])

    def __len__(self) -> int:
        return len(vars(self)["_dataset"])

    def __getitem__(self, index: Any) -> Any:
        from nano_loop.images.session import fetching

        with fetching(vars(self)["_reading"]):
            return vars(self)["_dataset"][index]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        from nano_loop.images.session import fetching

        dataset = vars(self)["_dataset"]
        with fetching(vars(self)["_reading"], deferring=vars(self)["_batched"]):
            if getattr(dataset, "__getitems__", None):
                return dataset.__getitems__(indices)
            return [dataset[index] for index in indices]


class CachedImages(LoaderChange):
    """Fetches through the cache, with the same pixels if `exact`."""

    def __init__(self, store: Store, exact: bool) -> None:
        self._store = store
        self._exact = exact

    def attributes(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """See `LoaderChange.attributes`."""
        if refusal(loader):
            return {}
        batched = is_default_collate(loader.collate_fn) and loader.batch_sampler is not None
        changed: dict[str, Any] = {"dataset": Images(loader.dataset, self._store, self._exact, batched)}
        if batched:
            from nano_loop.images.batches import collate

            changed["collate_fn"] = collate
        return changed


def refusal(loader: DataLoader[Any]) -> str | None:
    """Return why a loader is left alone, or None."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return "the dataset is an IterableDataset"
    if not compositions():
        return "torchvision is not imported"
    if not pipelines_in(dataset):
        return f"no pipeline of torchvision's was found in the dataset, a {type(dataset).__name__}"
    return None


def has_images(dataset: Any) -> bool:
    """Whether there is a dataset or a pipeline of torchvision's in a dataset."""
    own = any(type(part).__module__.startswith("torchvision.") for part in datasets_in(dataset))
    return own or bool(pipelines_in(dataset))


def pipelines_in(dataset: Any) -> list[Any]:
    """Return the pipelines in a dataset, in the datasets that it is made of, and in attributes of these."""
    kinds = tuple(kind for kind in (*compositions(), image_preset()) if kind is not None)
    return [value for value in _reached(dataset) if isinstance(value, kinds)]


def plans_in(dataset: Any) -> list[Plan]:
    """Return how the pipelines in a dataset are run."""
    return [plan for pipeline in pipelines_in(dataset) if (plan := plan_of(pipeline)) is not None]


def datasets_in(dataset: Any) -> list[Any]:
    """Return a dataset and the datasets that it is made of."""
    return [value for value in _reached(dataset) if value is dataset or isinstance(value, Dataset)]


def direct_pipelines(dataset: Any) -> list[Any]:
    """Return the pipelines whose results are items of the batch as they are; none if some are not."""
    leaves = [*_leaves(dataset)]
    if not all(_gives_pairs(leaf) for leaf in leaves):
        return []
    return [leaf.transform for leaf in leaves if leaf.transform is not None]


def _gives_pairs(dataset: Any) -> bool:
    kind = type(dataset)
    own = getattr(sys.modules.get("torchvision.datasets"), kind.__name__, None)
    return kind.__name__ in _PAIRS and kind is own and dataset.target_transform is None


def _leaves(dataset: Any) -> Iterator[Any]:
    if type(dataset) is Subset:
        yield from _leaves(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        for part in dataset.datasets:
            yield from _leaves(part)
    else:
        yield dataset


def _reached(start: Any) -> Iterator[Any]:
    """Yield the objects in attributes, lists and dicts."""
    return walk([start], _held, depth=4, most=1000)


def _held(value: Any) -> Iterator[Any]:
    attributes = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    held = islice(items_of(value), _ITEMS) if isinstance(value, CONTAINERS) else attributes
    return (item for item in held if not isinstance(item, _PLAIN))


_ITEMS = 16  # of a container
_PLAIN = (bool, int, float, str, bytes, type(None))
