"""The end of a pipeline on whole batches: converts bytes to scaled and normalized floats, by the same operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from nano_loop.data.images.pipelines import applied, numbers
from nano_loop.patching.torch_private_loaders import collates_as_torch, shared_storage


class Pending(NamedTuple):
    """An image to which the end of its pipeline must still be applied."""

    pixels: np.ndarray[Any, Any]  # bytes, of shape (H, W, C)
    end: tuple[Any, ...]  # `ToTensor`, and then `Normalize`

    def finished(self) -> Any:
        """Return the result of the plain pipeline."""
        return applied(self.end, Image.fromarray(self.pixels[..., 0] if self.pixels.shape[2] == 1 else self.pixels))


def pending(image: Any, end: tuple[Any, ...]) -> Any:
    """Return an image for a batch, or apply the end of its pipeline now if its pixels are not bytes."""
    if not end or not isinstance(image, Image.Image) or image.mode not in ("L", "RGB"):
        return applied(end, image)
    pixels = np.asarray(image)
    return Pending(pixels if pixels.ndim == 3 else pixels[..., None], end)


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples as `default_collate` does, and apply the rest of the pipeline to pending images."""
    if collates_as_torch() and _go_together(samples):
        images, targets = zip(*samples, strict=True)
        return [_batch(images), default_collate([*targets])]
    return default_collate([_finished(sample) for sample in samples])  # which also reports errors


def _finished(sample: Any) -> Any:
    if type(sample) is not tuple:
        return sample
    return tuple(part.finished() if isinstance(part, Pending) else part for part in sample)


def _go_together(samples: Sequence[Any]) -> bool:
    if not all(type(sample) is tuple and len(sample) == 2 and isinstance(sample[0], Pending) for sample in samples):
        return False
    first = samples[0][0]
    return all(image.end == first.end and image.pixels.shape == first.pixels.shape for image, _ in samples) and all(
        len(numbers(transform.mean)) in (1, first.pixels.shape[2]) and all(numbers(transform.std))
        for transform in first.end[1:]
    )


def _batch(images: Sequence[Pending]) -> Tensor:
    height, width, channels = images[0].pixels.shape
    pixels = torch.from_numpy(np.stack([image.pixels for image in images]))
    batch = _empty((len(images), channels, height, width), torch.get_default_dtype())
    batch.copy_(pixels.permute(0, 3, 1, 2)).div_(255)
    for transform in images[0].end[1:]:
        batch.sub_(_of_channels(transform.mean)).div_(_of_channels(transform.std))
    return batch


def _of_channels(values: Any) -> Tensor:
    return torch.tensor(numbers(values), dtype=torch.get_default_dtype()).view(-1, 1, 1)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a batch, in a loader's worker in memory shared with the main process, as torch's collate does."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    size = torch.empty((), dtype=dtype).element_size() * math.prod(shape)
    return torch.empty(0, dtype=dtype).set_(shared_storage(size), 0, shape)  # type: ignore[call-overload, no-any-return]
