"""Caches decoded and resized images, so that only the first epoch decodes them.

The other image modules are imported only with torchvision, because they need Pillow, which nano_loop does not require.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from typing_extensions import override

from nano_loop.data.images.pipelines import compositions
from nano_loop.errors import NanoError
from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with
from nano_loop.patching.loaders import changed
from nano_loop.runtime.objects.report import StepResult, size
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import ABSENT, SkipReason, Step

if TYPE_CHECKING:
    from nano_loop.data.images.store import Store


class FastImages(Step):
    """Iterates over a private copy of each loader of images, which fetches through a cache.

    It stores results of the deterministic transforms at the beginning of torchvision's pipelines; others run as usual.
    """

    name = "fast_images"
    needs = "loaders"

    @override
    def begin(self) -> None:
        self._stores: dict[str, Store] = {}
        self._changed: Any = WeakIdKeyDictionary()  # loaders

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if not compositions():
            return SkipReason("no_images", "torchvision is not imported", ABSENT)
        from nano_loop.data.images.folders import has_images, refusal

        # Most loaders have no images, even if torchvision is imported.
        reasons = [
            SkipReason("no_images", reason, "" if has_images(loader.dataset) else ABSENT) if reason else None
            for loader, reason in zip(parts.loaders, map(refusal, parts.loaders), strict=True)
        ]
        return SkipReason.of_all(reasons)

    @override
    def apply(self, parts: TrainingObjects) -> str:
        from nano_loop.data.images.folders import refusal

        fitting = [loader for loader in parts.loaders if not refusal(loader)]
        reasons = [reason for loader in fitting if (reason := self._cache(loader))]
        if reasons:
            return f"left alone: {reasons[0]}"
        limits = {store.limit for store in self._stores.values()}
        room = ", ".join(sorted(_in_words(limit) for limit in limits))
        return f"{len(fitting)} of {len(parts.loaders)} loaders, {_kept(fitting)}; {room}"

    @override
    def final_result(self) -> StepResult | None:
        if not self._stores or self.ranks.rank:
            return None
        lines = []
        for store in self._stores.values():
            usage = store.usage()
            lines.append(f"{usage.entries:,} images in the cache, {usage.size / 1e6:,.0f} MB")
            lines += [f"left alone: {note}" for note in store.notes()]
        return StepResult("image_cache", "measured", "; ".join(lines))

    def _cache(self, loader: DataLoader[Any]) -> str | None:
        """Change a loader and return None, or return why it cannot be cached."""
        from nano_loop.data.images.folders import CachedImages, datasets_in
        from nano_loop.data.images.lifetime import store_for

        if loader in self._changed:
            return None
        try:
            place: int | str | None = self.options.image_cache  # type: ignore[assignment]  # a path is a str by now
            store = store_for(datasets_in(loader.dataset), place, self.ranks)
        except OSError as error:
            return f"the folder of the cache cannot be created ({error.strerror})"
        except NanoError as error:
            return f"the folder of the cache cannot be used ({error})"
        self._changed[loader] = True
        self._stores[str(store.folder)] = store
        undone_with(loader, self.undoing).enter_context(changed(loader, CachedImages(store, self.options.exact_images)))
        return None


def _kept(loaders: list[DataLoader[Any]]) -> str:
    from nano_loop.data.images.folders import plans_in

    kept = [plan.first for loader in loaders for plan in plans_in(loader.dataset)]
    texts = [f"cached after {type(first[-1]).__name__}" if first else "cached as decoded" for first in kept]
    return ", ".join(dict.fromkeys(texts))


def _in_words(limit: int | None) -> str:
    return "in the folder of image_cache" if limit is None else f"up to {size(limit)} of memory"
