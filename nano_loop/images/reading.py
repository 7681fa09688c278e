"""The state that the fetches of a loader share, and where the pixels of an image are from."""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import ImageFile, features
from PIL import __version__ as pillow_version

from nano_loop.images.drafts import Draft
from nano_loop.images.pipelines import Plan, Plans
from nano_loop.images.sources import FileState, Source
from nano_loop.images.store import Store

#: The number of pipelines that a loader may use in turn.
_SEVERAL = 4
#: The attribute of an image that has its `Origin`.
ORIGIN = "_nano_loop_origin"


@dataclass
class Reading:
    """What the fetches of a loader in one process have in common."""

    store: Store  # the cache
    exact: bool  # whether pixels have to be the same
    plans: list[Plan] = field(default_factory=list)  # the pipelines that were found, or used last
    #: The pipelines whose results go straight into a batch, by their ids.
    deferring: dict[int, Any] = field(default_factory=dict)
    has_met_new_files: bool = False  # whether a file was too new to be kept
    read: Plans = field(default_factory=Plans)  # the plans of the pipelines that images went through

    def accepts(self, state: FileState) -> bool:
        """Whether a change of the file from now on would be noticed."""
        self.has_met_new_files |= not state.is_settled
        return state.is_settled

    def used(self, plan: Plan) -> None:
        """Note a pipeline."""
        if not any(other.key == plan.key for other in self.plans):
            self.plans = [plan, *self.plans[: _SEVERAL - 1]]


class Current(threading.local):
    """The fetch of a thread, if it is in one."""

    reading: Reading | None = None
    deferring = False


current = Current()


@contextmanager
def in_fetch(reading: Reading | None, deferring: bool = False) -> Iterator[None]:
    """Let what this thread calls be a part of a fetch; None: let it run as always."""
    before = current.reading, current.deferring
    current.reading, current.deferring = reading, deferring
    try:
        yield
    finally:
        current.reading, current.deferring = before


class Origin:
    """Where the pixels of an image are from, as a part of keys."""

    def __init__(self, state: Any, mode: str) -> None:
        self.state = state
        self.mode = mode
        self.draft: Draft | None = None

    def key(self, plan: Plan, exact: bool) -> str:
        """Return the key of the cache for the result of a pipeline's deterministic transforms."""
        parts = (self.state, self.mode, plan.key, exact, ImageFile.LOAD_TRUNCATED_IMAGES, _versions())
        return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


@functools.cache
def _versions() -> tuple[Any, ...]:
    torchvision = sys.modules.get("torchvision")
    codecs = tuple(features.version(name) for name in ("jpg", "zlib", "libjpeg_turbo"))
    return pillow_version, codecs, getattr(torchvision, "__version__", ""), torch.__version__


def close_later(image: Any, source: Source) -> None:
    """Close the file that Pillow has opened once the image is gone, as decoding it would have done."""
    if source.is_own:
        weakref.finalize(image, image.fp.close).atexit = False
