"""Arguments of the C functions of ``norms.c``: the supported tensors, their sizes, layouts and addresses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.memory import is_plain

#: Minimum number of contiguous elements: channels in NHWC, pixels in NCHW, elements of a row.
_FEW = 16
#: Minimum number of pixels of an NCHW image for a forward, by dtype: with fewer, torch's kernel was faster.
_FEW_PIXELS = {torch.bfloat16: 128, torch.float32: 48}
_DTYPES = tuple(_FEW_PIXELS)
#: Minimum number of elements. Below it, the Python overhead exceeds the gain with several threads, in any layout.
MIN_ELEMENTS = 1 << 18
#: The memory formats with contiguous channels, by number of dimensions.
NHWC = {4: torch.channels_last, 5: torch.channels_last_3d}


#: Accepts the number of values per channel of this tensor, and two sums by channel. Adds the sums of the other parts of
#: the batch in place, and returns the number of values per channel in the whole batch.
Exchange = Callable[[float, Tensor, Tensor], float]
_Callback: Any = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.POINTER(ctypes.c_double)] * 3)


class _Shape(ctypes.Structure):
    """The layout of a tensor: ``Shape`` of ``norms.c``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("segments", "rows", "channels", "nhwc", "bf16")),
        ("exchange", _Callback),
    ]


@contextmanager
def exchanging(shape: _Shape, exchange: Exchange | None) -> Iterator[None]:
    """Let a C function that receives `shape` in the body call `exchange`, and re-raise its exceptions afterwards."""
    if exchange is None:
        yield
        return
    errors: list[BaseException] = []
    array = ctypes.c_double * shape.channels

    def call(count: Any, *pointers: Any) -> bool:
        arrays = [array.from_address(ctypes.addressof(pointer.contents)) for pointer in pointers]
        try:
            count[0] = exchange(count[0], *(torch.frombuffer(sums, dtype=torch.float64) for sums in arrays))
        except BaseException as error:  # including KeyboardInterrupt, which would be lost in C
            errors.append(error)
        return not errors

    shape.exchange = _Callback(call)
    yield
    if errors:
        raise errors[0]


class Layout(NamedTuple):
    """The sizes, the memory format and the dtype of a tensor of shape (N, C, *)."""

    images: int
    channels: int
    pixels: int
    format: torch.memory_format
    dtype: torch.dtype

    @property
    def is_nhwc(self) -> bool:
        """Whether channels are contiguous, which is also the case if there is only one pixel."""
        return self.pixels == 1 or self.format is not torch.contiguous_format

    @property
    def has_fast_forward(self) -> bool:
        """Whether the forward is faster than by torch's kernels."""
        return self.is_nhwc or self.pixels >= _FEW_PIXELS[self.dtype]

    def has_groups(self, images: int, channels: int, pixels: int, groups: int) -> bool:
        """Whether these are the sizes of a tensor with this number of equal groups. torch raises otherwise."""
        return self[:3] == (images, channels, pixels) and groups > 0 and channels % groups == 0


def layout_of(x: Tensor) -> Layout | None:
    """Return the layout of a tensor, or None if torch must compute."""
    if not is_plain(x, _DTYPES) or x.dim() < 2:
        return None
    if x.is_contiguous():
        form = torch.contiguous_format
    elif x.dim() in NHWC and x.is_contiguous(memory_format=NHWC[x.dim()]):
        form = NHWC[x.dim()]
    else:
        return None
    layout = Layout(x.size(0), x.size(1), math.prod(x.shape[2:]), form, x.dtype)
    return layout if (layout.channels if layout.is_nhwc else layout.pixels) >= _FEW else None


def shape_of(x: Tensor, layout: Layout, together: bool = False) -> _Shape:
    """Return the ``Shape`` of a tensor. NHWC images that share their statistics are one segment."""
    one = together and layout.is_nhwc
    segments, rows = (1, layout.images * layout.pixels) if one else (layout.images, layout.pixels)
    return _Shape(segments, rows, layout.channels, layout.is_nhwc, x.dtype is torch.bfloat16)


def supports_rows(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether the last dimensions of a tensor have this shape and form rows that the functions support."""
    return is_plain(x, _DTYPES) and tuple(x.shape[x.dim() - len(shape) :]) == tuple(shape) and math.prod(shape) >= _FEW


def rows_of(x: Tensor, shape: Sequence[int]) -> tuple[int, int, bool]:
    """Return the number of rows of this shape, their length, and whether they are in bf16."""
    width = math.prod(shape)
    return x.numel() // width, width, x.dtype is torch.bfloat16


def are_fp32(count: int, *parameters: Tensor | None) -> bool:
    """Whether the weights and statistics that are not None are fp32 tensors of `count` elements."""
    present = [parameter for parameter in parameters if parameter is not None]
    return all(parameter.dtype is torch.float32 and parameter.numel() == count for parameter in present)


def has_fp32_statistics(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether torch's statistics are in fp32: those of a bf16 input without weights are in bf16."""
    return x.dtype is torch.float32 or any(parameter is not None for parameter in parameters)
