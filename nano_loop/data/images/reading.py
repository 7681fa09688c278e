"""Reads image files through the cache: the result of the deterministic transforms is looked up, or made and cached.

If the first transform resizes JPEG images to less than 1/2, 1/4 or 1/8 of their size, they are decoded at that size.
libjpeg does this in its block transform, at a fraction of the cost. The pixels differ from decoding at full size;
docs/images.md shows by how much.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageFile, features
from PIL import __version__ as pillow_version

from nano_loop.data.images.batches import Pending, pending
from nano_loop.data.images.pipelines import V1, Plan, applied
from nano_loop.data.images.store import Store, entry_of


def resized(path: str, resize: Any) -> Any:
    """Return the result of a `Resize` for an image file; None if the image must be decoded at full size."""
    if type(resize).__name__ != "Resize":
        return None
    with Image.open(path) as image:
        size = image.size
        target = _target_size(size, resize.size, resize.max_size)
        if target is None or image.draft(image.mode, (target[1], target[0])) is None or image.size == size:
            return None
        converted = image.convert("RGB")
    functional: Any = sys.modules[f"{V1}.functional"]
    return functional.resize(converted, list(target), resize.interpolation)


def _target_size(size: tuple[int, int], wanted: Any, longest: int | None) -> tuple[int, int] | None:
    """Return the height and width that torchvision's `Resize` returns for a size; None if a longest edge is given."""
    edges = [wanted] if isinstance(wanted, int) else list(wanted or ())
    if longest is not None or len(edges) not in (1, 2):
        return None
    if len(edges) == 2:
        return edges[0], edges[1]
    width, height = size
    if width <= height:
        return int(edges[0] * height / width), edges[0]
    return edges[0], int(edges[0] * width / height)


#: Seconds. A file that was changed more recently may change again without a new modification time.
SETTLED = 2.0


class Reading(NamedTuple):
    """How the images of a loader are read."""

    store: Store  # the cache
    exact: bool  # whether pixels must be the same
    is_batched: bool  # whether `batches.collate` collates, so that images may be `Pending`

    def image(self, path: str, load: Callable[[str], Any], plan: Plan) -> Any:
        """Return the result of the pipeline with this plan for an image file. `load` opens and decodes the file."""
        state = _file_state(path)
        if state is None:
            return self._finished(plan, applied(plan.first, load(path)))
        key = _key(state, plan.key, self.exact)
        entry = self.store.get(key)
        if entry is None:
            image = self._made(path, load, plan)
            self._keep(key, image)  # keyed by this state, which does not recur if the file has changed since
            return self._finished(plan, image)
        if self.is_batched and plan.end and not plan.middle:
            return Pending(entry.pixels, plan.end)
        return self._finished(plan, entry.image())

    def _made(self, path: str, load: Callable[[str], Any], plan: Plan) -> Any:
        image = None if self.exact or not plan.first else resized(path, plan.first[0])
        return applied(plan.first, load(path)) if image is None else applied(plan.first[1:], image)

    def _keep(self, key: str, image: Any) -> None:
        entry = entry_of(image)
        if entry is None:
            self.store.note(f"images of mode {getattr(image, 'mode', type(image).__name__)}, or with other metadata")
        else:
            self.store.put(key, entry)

    def _finished(self, plan: Plan, image: Any) -> Any:
        """Apply the transforms after the deterministic ones, except those that are applied to the batch."""
        image = applied(plan.middle, image)
        return pending(image, plan.end) if self.is_batched else applied(plan.end, image)


def _file_state(path: str) -> tuple[Any, ...] | None:
    """Return a file and its state, with the inode; None if there is none, or it may not show a later change."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if time.time() - max(status.st_mtime, status.st_ctime) <= SETTLED:
        return None
    return os.path.abspath(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _key(*parts: Any) -> str:
    """Return the key of the cache for the result of a pipeline's deterministic transforms."""
    everything = (*parts, ImageFile.LOAD_TRUNCATED_IMAGES, _versions())
    return hashlib.blake2b(repr(everything).encode(), digest_size=20).hexdigest()


@functools.cache
def _versions() -> tuple[Any, ...]:
    codecs = tuple(features.version(name) for name in ("jpg", "zlib", "libjpeg_turbo", "webp", "libtiff"))
    return pillow_version, codecs, sys.modules["torchvision"].__version__, torch.__version__
