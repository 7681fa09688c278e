"""The end of a pipeline on whole batches: bytes to scaled and normalized floats, by the operations of the plain way."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate, get_worker_info

from nano_loop.images.pipelines import Conversion, Plan, applied
from nano_loop.patching.torch_private_loaders import registered_collates, shared_storage


class Pending(NamedTuple):
    """An image to which the end of its pipeline is still to be applied."""

    pixels: np.ndarray[Any, Any]  # bytes, of shape (H, W, C)
    is_pil: bool  # whether the plain way has a Pillow image here, and else a tensor
    typed: type | None  # the class of this tensor
    plan: Plan  # the pipeline

    def finished(self) -> Any:
        """Return the result of the plain way."""
        conversion = self.plan.conversion
        left = self.plan.transforms[conversion.first if conversion else 0 :]
        return applied(left, self._image() if self.is_pil else self._tensor())

    def _image(self) -> Image.Image:
        return Image.fromarray(self.pixels[..., 0] if self.pixels.shape[2] == 1 else self.pixels)

    def _tensor(self) -> torch.Tensor:
        tensor = torch.from_numpy(self.pixels.copy()).permute(2, 0, 1)
        return tensor if self.typed is None else tensor.as_subclass(self.typed)


def of_entry(pixels: np.ndarray[Any, Any], kind: type | None, is_pil: bool, plan: Plan) -> Pending | None:
    """Return an image for a batch whose bytes are those of the cache, or None as `pending` does."""
    conversion = plan.conversion
    if conversion is None or conversion.from_pil is not is_pil or (conversion.typed and not _stacks_to_a_tensor()):
        return None
    return Pending(pixels, is_pil, kind, plan)


def _stacks_to_a_tensor() -> bool:
    """Whether a batch of typed images is a plain tensor, as it is unless torchvision's `set_return_type` says else."""
    module = sys.modules.get("torchvision.tv_tensors")
    return module is None or type(torch.stack([module.Image(torch.zeros(1, 1, 1))])) is torch.Tensor


def pending(value: Any, plan: Plan) -> Pending | None:
    """Return an image for a batch, or None if its pixels are not bytes as the conversion needs them."""
    conversion = plan.conversion
    if conversion is None:
        return None
    if isinstance(value, Image.Image):
        if not conversion.from_pil or value.mode not in ("L", "RGB"):
            return None
        pixels = np.asarray(value)
        return of_entry(pixels if pixels.ndim == 3 else pixels[..., None], None, True, plan)
    if conversion.from_pil or not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 3:
        return None
    kind = None if type(value) is torch.Tensor else type(value)
    return of_entry(value.as_subclass(torch.Tensor).permute(1, 2, 0).numpy(), kind, False, plan)


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples as `default_collate` does, and apply the rest of the pipeline to pending images."""
    first = samples[0]
    if registered_collates():
        return default_collate([_finished(sample) for sample in samples])
    if isinstance(first, Pending):
        return _batch(samples)
    if type(first) is tuple:
        columns = [*zip(*samples, strict=True)]
        return [_batch(column) if isinstance(column[0], Pending) else default_collate([*column]) for column in columns]
    return default_collate([*samples])


def _parts(sample: Any) -> tuple[Any, ...]:
    return sample if type(sample) is tuple else (sample,)


def _finished(sample: Any) -> Any:
    parts = tuple(part.finished() if isinstance(part, Pending) else part for part in _parts(sample))
    return parts if type(sample) is tuple else parts[0]


def _batch(images: Sequence[Pending]) -> Any:
    if not _go_together(images):
        return default_collate([image.finished() for image in images])  # and it says what is wrong
    conversion: Any = images[0].plan.conversion
    height, width, channels = images[0].pixels.shape
    pixels = torch.from_numpy(np.stack([image.pixels for image in images]))
    batch = _empty((len(images), channels, height, width), _dtype(images[0]))
    batch.copy_(pixels.permute(0, 3, 1, 2))
    return _converted(batch, conversion)


def _converted(batch: torch.Tensor, conversion: Conversion) -> torch.Tensor:
    if conversion.divides:
        batch.div_(255)
    else:
        batch.mul_(1.0 / 255)
    for mean, std in conversion.normalizations:
        batch.sub_(_of_channels(mean, batch.dtype)).div_(_of_channels(std, batch.dtype))
    return batch


def _go_together(images: Sequence[Any]) -> bool:
    first = images[0]
    return all(
        isinstance(image, Pending) and image.plan[2:] == first.plan[2:] and image.pixels.shape == first.pixels.shape
        for image in images
    ) and all(
        len(mean) in (1, first.pixels.shape[2]) and all(std) for mean, std in first.plan.conversion.normalizations
    )


def _of_channels(values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).view(-1, 1, 1)


def _dtype(image: Pending) -> torch.dtype:
    names = {type(transform).__name__ for transform in image.plan.transforms}
    return torch.get_default_dtype() if "ToTensor" in names else torch.float32


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a batch; in a loader's worker, memory that the main process shares, as torch's collate does."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    size = torch.empty((), dtype=dtype).element_size() * math.prod(shape)
    return torch.empty(0, dtype=dtype).set_(shared_storage(size), 0, shape)  # type: ignore[call-overload, no-any-return]
