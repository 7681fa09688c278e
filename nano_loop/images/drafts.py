"""JPEG images decoded at a half, a quarter or an eighth of their size, where the first transform resizes them below it.

libjpeg does this in the transform of its blocks, at a fraction of the cost. The pixels differ from those of a decoding
in full size; docs/images.md says by how much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nano_loop.images.pipelines import V1, Plan


class Draft(NamedTuple):
    """An image that was decoded in a smaller size."""

    image: Any  # the image in the smaller size
    size: tuple[int, int]  # width and height of the whole image
    target: tuple[int, int]  # height and width after the first transform
    resize: Any  # the first transform

    def resized(self) -> Any:
        """Return the image in the size in which the first transform returns the whole one."""
        functional: Any = sys.modules[f"{V1}.functional"]
        return functional.resize(self.image, list(self.target), self.resize.interpolation)


def drafted(image: Any, mode: str, plans: Sequence[Plan], convert: Callable[..., Any]) -> Draft | None:
    """Decode an opened JPEG file for pipelines, or return None if it is to be decoded in full size."""
    if len(plans) != 1 or image.format not in ("JPEG", "MPO") or not plans[0].resizes:
        return None
    resize = plans[0].transforms[0]
    if type(resize).__name__ != "Resize":
        return None
    size = image.size
    target = target_size(size, resize.size, resize.max_size)
    if target is None or image.draft(image.mode, (target[1], target[0])) is None or image.size == size:
        return None
    return Draft(convert(image, mode), size, target, resize)


def target_size(size: tuple[int, int], wanted: Any, longest: int | None) -> tuple[int, int] | None:
    """Return height and width of torchvision's `Resize`; None where a longest edge is given.

    Parameters
    ----------
    size : tuple of int
        Width and height of the image.
    wanted : int or sequence of int
        The shorter edge, or height and width.
    longest : int or None
        The upper bound of the longer edge.
    """
    edges = [wanted] if isinstance(wanted, int) else list(wanted or ())
    if longest is not None or len(edges) not in (1, 2):
        return None
    if len(edges) == 2:
        return edges[0], edges[1]
    width, height = size
    if width <= height:
        return int(edges[0] * height / width), edges[0]
    return edges[0], int(edges[0] * width / height)
