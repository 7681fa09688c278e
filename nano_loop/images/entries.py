"""Images as bytes, for the cache. An image that is read back has all that a transform may look at."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

#: Modes whose pixels go to bytes and back without a loss.
_MODES = ("L", "RGB", "RGBA", "LA", "CMYK", "YCbCr")
_LONGEST_INFO = 1 << 16
_PLAIN = (bool, int, float, str, bytes, type(None))
Header = dict[str, Any]


def written(value: Any) -> tuple[Header, bytes | memoryview] | None:
    """Return the header and the pixels of an image, or None if it cannot be read back exactly.

    Parameters
    ----------
    value : PIL.Image.Image or torch.Tensor
        A plain Pillow image, or a tensor of dtype uint8, of shape (C, H, W).
    """
    if isinstance(value, torch.Tensor):
        return _written_tensor(value)
    if type(value) is not Image.Image or value.mode not in _MODES or value.palette is not None:
        return None
    info = repr(value.info) if value.info else ""
    if not _is_short(info) or not _is_plain(value.info):
        return None
    return {"kind": "pil", "mode": value.mode, "size": value.size, "info": info}, value.tobytes()


def fits(header: Any, size: int) -> bool:
    """Whether a header is one that `written` has made for an image of so many bytes."""
    match header:
        case {"kind": "pil", "mode": mode, "size": [int(width), int(height)], "info": str(info)} if mode in _MODES:
            return min(width, height) >= 0 and width * height * Image.getmodebands(mode) == size and _is_short(info)
        case {
            "kind": "tensor" | "image",
            "shape": [int(), int(), int()] as shape,
            "strides": [int(), int(), int()] as strides,
        }:
            return min(shape) > 0 and min(strides) >= 0 and _span(shape, strides) == size
    return False


def read(header: Header, pixels: memoryview) -> Any:
    """Return the image of a header and pixels. It has the memory to itself."""
    if header["kind"] == "pil":
        width, height = header["size"]
        image = Image.frombytes(header["mode"], (width, height), pixels)
        image.info = dict(_info(header["info"]))
        return image
    tensor = torch.frombuffer(pixels, dtype=torch.uint8).as_strided(header["shape"], header["strides"])
    return typed_image()(tensor) if header["kind"] == "image" else tensor


def shape_of(header: Header) -> tuple[int, int, int] | None:
    """Return height, width and channels of a Pillow image whose pixels are bytes in this order, or None."""
    if header["kind"] == "pil" and header["mode"] in ("L", "RGB"):
        width, height = header["size"]
        return height, width, 3 if header["mode"] == "RGB" else 1
    return None


def _written_tensor(value: torch.Tensor) -> tuple[Header, bytes | memoryview] | None:
    kind = {torch.Tensor: "tensor", typed_image(): "image"}.get(type(value))
    if kind is None or value.dtype != torch.uint8 or value.dim() != 3 or value.requires_grad:
        return None
    plain = value.as_subclass(torch.Tensor)
    # With the same strides, since what kernels compute may depend on them. A crop has gaps, which are kept.
    span = _span(plain.shape, plain.stride())
    if not plain.numel() or span > 2 * plain.numel():
        return None
    header = {"kind": kind, "shape": list(plain.shape), "strides": list(plain.stride())}
    return header, plain.as_strided((span,), (1,)).numpy().tobytes()


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return from the first to the last element of a tensor, in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _is_short(info: str) -> bool:
    return len(info) <= _LONGEST_INFO


def typed_image() -> Any:
    """Return the class of images of torchvision that are tensors, or None if it is not imported."""
    module = sys.modules.get("torchvision.tv_tensors")
    return module.Image if module is not None else None


def _is_plain(info: dict[Any, Any]) -> bool:
    """Whether `ast.literal_eval` reads the `repr` of an image's metadata back."""
    return all(type(key) in _PLAIN and _is_literal(value) for key, value in info.items())


def _is_literal(value: Any) -> bool:
    if type(value) is tuple:  # not a list, which could be changed
        return all(map(_is_literal, value))
    # The repr of nan and inf is a name.
    return type(value) in _PLAIN and not (type(value) is float and value - value != 0)


@functools.lru_cache(maxsize=64)
def _info(text: str) -> dict[Any, Any]:
    info: dict[Any, Any] = ast.literal_eval(text or "{}")
    return info
