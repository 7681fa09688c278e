"""One fetch of a loader: during it, files that were decoded before are not decoded again.

`PIL.Image.open`, `Image.convert` and the call of torchvision's pipelines are replaced. In the thread of a fetch, `open`
notes the state of the file, `convert` returns an image that is decoded when its pixels are needed, and a pipeline takes
the result of its deterministic transforms from the cache. Everything else runs as always, random transforms with their
draws in particular; so does what another thread calls.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile

from nano_loop.images import entries
from nano_loop.images.batches import Pending, of_entry, pending
from nano_loop.images.deferred import DeferredImage, decoded, is_deferred
from nano_loop.images.drafts import drafted
from nano_loop.images.pipelines import Plan, applied, compositions
from nano_loop.images.reading import ORIGIN, Origin, Reading, close_later, current, in_fetch
from nano_loop.images.sources import FileState, Source, file_state, is_in_state, remember, source_of
from nano_loop.patching.attributes import replaced
from nano_loop.patching.torch_private import image_preset

#: Bytes. Up to this size, an image that is not from a file is recognized by its pixels.
_SMALL = 1 << 16
_CONVERTED_TO = ("RGB", "L", "RGBA")


@contextmanager
def fetching(reading: Reading, deferring: bool = False) -> Iterator[None]:
    """Take images from the cache in the body, in this thread. Results may be `Pending` if it is `deferring`."""
    with ExitStack() as stack:
        stack.enter_context(replaced(Image, "open", _opening))
        stack.enter_context(replaced(Image.Image, "convert", _converting))
        for kind in (*compositions(), image_preset()):
            if kind is not None:
                name = "forward" if issubclass(kind, torch.nn.Module) else "__call__"
                stack.enter_context(replaced(kind, name, _transforming))
        stack.enter_context(in_fetch(reading, deferring))
        yield


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
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


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
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
    with in_fetch(None):
        if image is not None and image.fp is not None and not image.fp.closed:
            return original(image, mode)
        with Image.open(state.path) as again:
            return original(again, mode)


def _transforming(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def transform(self: Any, *inputs: Any) -> Any:
        reading = current.reading
        if reading is None:
            return original(self, *inputs)
        deferring = current.deferring and id(self) in reading.deferring
        with in_fetch(None):
            if len(inputs) != 1:
                return original(self, *inputs)
            return _transformed(reading, self, inputs[0], deferring, original)

    return transform


def _transformed(reading: Reading, pipeline: Any, image: Any, deferring: bool, original: Callable[..., Any]) -> Any:
    plan = reading.read.of(pipeline)
    if plan is None:
        return original(pipeline, image)
    reading.used(plan)
    origin = _origin_of(reading, image, plan)
    if origin is None:
        return _finished(plan, applied(plan.transforms[: plan.prefix], image), deferring)
    key = origin.key(plan, reading.exact)
    entry = reading.store.get(key)
    if entry is None:
        value = _first(reading, plan, image, origin, key)
        return _finished(plan, value, deferring)
    header, pixels = entry
    if deferring and (direct := _direct(plan, header, pixels)) is not None:
        return direct
    return _finished(plan, entries.read(header, pixels), deferring)


def _origin_of(reading: Reading, image: Any, plan: Plan) -> Origin | None:
    """Return where an image is from, or None if that is not known or the image is not worth a place in the cache."""
    if is_deferred(image):
        origin: Origin = vars(image)[ORIGIN]
        return origin
    if not isinstance(image, Image.Image):
        reading.store.note(f"pipelines got a {type(image).__name__}, not a Pillow image")
        return None
    source = source_of(image)
    if source is not None:
        if not reading.accepts(source.state) or not plan.prefix:
            return None
        close_later(image, source)
        return Origin(source.state, image.mode)
    if plan.resizes and type(image) is Image.Image and image.palette is None and _bytes_of(image) <= _SMALL:
        pixels = hashlib.blake2b(image.tobytes(), digest_size=20).hexdigest()
        return Origin((pixels, image.size, repr(image.info)), image.mode)
    if not reading.has_met_new_files and (plan.prefix or isinstance(image, ImageFile.ImageFile)):
        reading.store.note(_unknown(image))
    return None


def _bytes_of(image: Any) -> int:
    return int(image.width * image.height * len(image.getbands()))


def _unknown(image: Any) -> str:
    if isinstance(image, ImageFile.ImageFile):
        return f"{image.format} files that are not converted to RGB, L or RGBA first, or are not files on a disk"
    return "images that were changed, or are not from files, before the pipeline"


def _first(reading: Reading, plan: Plan, image: Any, origin: Origin, key: str) -> Any:
    """Apply the deterministic transforms, and keep their result."""
    if origin.draft is not None:
        value = applied(plan.transforms[1 : plan.prefix], origin.draft.resized())
    else:
        value = applied(plan.transforms[: plan.prefix], decoded(image))
    if isinstance(origin.state, FileState) and not is_in_state(origin.state):
        return value
    kept = entries.written(value)
    if kept is None:
        reading.store.note(f"images of mode {getattr(value, 'mode', type(value).__name__)}, or with other metadata")
    else:
        reading.store.put(key, *kept)
    return value


def _direct(plan: Plan, header: dict[str, Any], pixels: memoryview) -> Pending | None:
    """Return an image of the cache for a batch, without making a Pillow image of it."""
    shape = entries.shape_of(header)
    if shape is None or plan.conversion is None or plan.conversion.first != plan.prefix:
        return None
    return of_entry(np.frombuffer(pixels, np.uint8).reshape(shape), None, True, plan)


def _finished(plan: Plan, value: Any, deferring: bool) -> Any:
    """Apply the transforms after the deterministic ones, except for those that are left to the batch."""
    until = plan.conversion.first if deferring and plan.conversion else len(plan.transforms)
    value = applied(plan.transforms[plan.prefix : until], value)
    if until < len(plan.transforms) and (left := pending(value, plan)) is not None:
        return left
    return applied(plan.transforms[until:], value)
