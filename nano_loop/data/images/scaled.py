"""Decodes JPEG images at 1/2, 1/4 or 1/8 of their size if the first transform resizes them to less than that.

libjpeg does this in its block transform, at a fraction of the cost. The pixels differ from decoding at full size;
docs/images.md shows by how much.
"""

from __future__ import annotations

import sys
from typing import Any

from PIL import Image

from nano_loop.data.images.pipelines import V1


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
