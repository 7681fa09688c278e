"""The image of a file, through the cache: what its deterministic transforms make of it is read, or made and kept."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from PIL import ImageFile, features
from PIL import __version__ as pillow_version

from nano_loop.data.images.batches import Pending, pending
from nano_loop.data.images.entries import entry_of
from nano_loop.data.images.pipelines import Plan, applied
from nano_loop.data.images.scaled import resized
from nano_loop.data.images.store import Store

#: Seconds. A file that was changed less than this ago may change again without a change of its time.
SETTLED = 2.0


class Reading(NamedTuple):
    """How the images of a loader are read."""

    store: Store  # the cache
    exact: bool  # whether pixels have to be the same
    is_batched: bool  # whether `batches.collate` makes the batches, so that images may be `Pending`

    def image(self, path: str, load: Callable[[str], Any], plan: Plan) -> Any:
        """Return what a pipeline makes of the image of a file.

        Parameters
        ----------
        load : callable
            Opens and decodes the file.
        plan : Plan
            Of the pipeline.
        """
        state = _file_state(path)
        if state is None:
            return self._finished(plan, applied(plan.first, load(path)))
        key = _key(state, plan.key, self.exact)
        entry = self.store.get(key)
        if entry is None:
            image = self._made(path, load, plan)
            self._keep(key, image)  # for this state, which will not come again if the file was changed meanwhile
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
        """Apply the transforms after the deterministic ones, except for those that are left to the batch."""
        image = applied(plan.middle, image)
        return pending(image, plan.end) if self.is_batched else applied(plan.end, image)


def _file_state(path: str) -> tuple[Any, ...] | None:
    """Return a file and its state; None where a change from now on may not show in it, or there is no file.

    Another file at the same path has another inode or another time of change.
    """
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
