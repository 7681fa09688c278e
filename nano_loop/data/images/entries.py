"""Images as bytes, for the cache. An image that is read back has everything that a transform may read."""

from __future__ import annotations

import ast
import functools
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

_MAGIC = b"nano_loop image 2"
_SUM = struct.Struct(f"<{len(_MAGIC)}sI")  # the magic, and the checksum of the rest
_HEAD = struct.Struct("<40siiBI")  # the key, height, width and channels, the bytes of the metadata
_MODES = {1: "L", 3: "RGB"}
_LONGEST_INFO = 1 << 16
_PLAIN = (bool, int, float, str, bytes, type(None))


class ImageEntry(NamedTuple):
    """An image in the cache."""

    pixels: np.ndarray[Any, Any]  # bytes, of shape (H, W, C)
    info: str  # the `repr` of Pillow's metadata

    def image(self) -> Image.Image:
        """Return the Pillow image."""
        height, width, channels = self.pixels.shape
        image = Image.frombytes(_MODES[channels], (width, height), self.pixels.data)
        image.info = _read_info(self.info).copy()
        return image

    def packed(self, key: str) -> tuple[bytes, np.ndarray[Any, Any]]:
        """Return the bytes of a file in two parts. The second part is the pixels."""
        info = self.info.encode()
        head = _HEAD.pack(key.encode(), *self.pixels.shape, len(info)) + info
        return _SUM.pack(_MAGIC, zlib.crc32(self.pixels.data, zlib.crc32(head))) + head, self.pixels


def entry_of(image: Any) -> ImageEntry | None:
    """Return the entry for an image, or None if it could not be read back exactly."""
    if type(image) is not Image.Image or image.mode not in _MODES.values():
        return None
    info = repr(image.info)
    if len(info) > _LONGEST_INFO or not all(map(_is_literal, (*image.info.keys(), *image.info.values()))):
        return None
    return ImageEntry(np.asarray(image).reshape(image.height, image.width, len(image.getbands())), info)


def unpacked(data: memoryview, key: str, check: bool) -> ImageEntry | None:
    """Return the entry in the bytes of a file, or None if they are damaged or for another key.

    Damaged bytes may also raise any exception.

    Parameters
    ----------
    check : bool
        Whether to verify the checksum.
    """
    rest = data[_SUM.size :]
    if len(rest) < _HEAD.size:
        return None
    magic, total = _SUM.unpack(data[: _SUM.size])
    its_key, height, width, channels, length = _HEAD.unpack(rest[: _HEAD.size])
    pixels = rest[_HEAD.size + length :]
    if (magic, its_key) != (_MAGIC, key.encode()) or channels not in _MODES or len(pixels) != height * width * channels:
        return None
    if check and zlib.crc32(rest) != total:
        return None
    info = bytes(rest[_HEAD.size :][:length]).decode()
    _read_info(info)
    return ImageEntry(np.frombuffer(pixels, np.uint8).reshape(height, width, channels), info)


def _is_literal(value: Any) -> bool:
    """Whether `ast.literal_eval` can read back the `repr` of a part of an image's metadata."""
    if type(value) is tuple:  # not a list, which is mutable
        return all(map(_is_literal, value))
    # The repr of nan and inf is not a literal.
    return type(value) in _PLAIN and not (type(value) is float and value - value != 0)


@functools.lru_cache(maxsize=64)
def _read_info(text: str) -> dict[Any, Any]:
    return dict[Any, Any](ast.literal_eval(text).items())
