"""Patches of `PIL.Image.open` and `Image.convert` in a fetch: a file that was decoded before is not decoded again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from PIL import Image

from nano_loop.images.deferred import DeferredImage, is_deferred
from nano_loop.images.drafts import drafted
from nano_loop.images.reading import ORIGIN, Origin, Reading, close_later, current, paused
from nano_loop.images.sources import FileState, Source, file_state, is_in_state, remember, source_of

_CONVERTED_TO = ("RGB", "L", "RGBA")


def opening(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let `PIL.Image.open` note the state of the file."""

    @functools.wraps(original)
    def open(fp: Any, *args: Any, **kwargs: Any) -> Any:
        if current.reading is None or not _is_at_start(fp):
            return original(fp, *args, **kwargs)
        image = original(fp, *args, **kwargs)
        remember(image, file_state(getattr(image, "fp", None)), is_own=not hasattr(fp, "read"))
        return image

    return open


def _is_at_start(fp: Any) -> bool:
    """Whether an image that is opened from a path or a file begins where the file begins."""
    if not hasattr(fp, "read"):
        return True
    try:
        return bool(fp.tell() == 0)
    except (OSError, ValueError, AttributeError):
        return False


def converting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let `Image.convert` return an image that is decoded when its pixels are needed, if it was decoded before."""

    @functools.wraps(original)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        reading = current.reading
        if reading is None or kwargs or len(args) != 1 or args[0] not in _CONVERTED_TO or is_deferred(self):
            return original(self, *args, **kwargs)
        source = source_of(self)
        if source is None or not reading.accepts(source.state):
            return original(self, *args, **kwargs)
        return _converted(reading, self, source, args[0], original)

    return convert


def _converted(reading: Reading, image: Any, source: Source, mode: str, original: Callable[..., Any]) -> Any:
    """Return the result of a conversion, undecoded if it was decoded before."""
    state = source.state
    origin = Origin(state, mode)
    if any(origin.key(plan, reading.exact) in reading.store for plan in reading.plans):
        close_later(image, source)
        result = DeferredImage(image.size, mode, functools.partial(_decode, image, state, mode, original))
    elif not reading.exact and (draft := drafted(image, mode, reading.plans, original)) is not None:
        origin.draft = draft
        result = DeferredImage(draft.size, mode, functools.partial(_decode, None, state, mode, original))
    else:
        real = original(image, mode)
        if not is_in_state(state):  # it was changed while it was read
            return real
        result = DeferredImage(real.size, mode, lambda: real)
    vars(result)[ORIGIN] = origin
    return result


def _decode(image: Any, state: FileState, mode: str, original: Callable[..., Any]) -> Any:
    """Return the converted image in the plain way, from the opened file if it is still open."""
    with paused():
        if image is not None and image.fp is not None and not image.fp.closed:
            return original(image, mode)
        with Image.open(state.path) as again:
            return original(again, mode)
