"""Batch norm, group norm and layer norm at memory bandwidth, forward and backward, for fp32 and bf16 tensors.

torch's kernels convert bf16 element by element or use one thread per group, and reach a tenth to half of the memory
bandwidth. Many fp32 kernels reach all of it and are kept. A C function (``norms.c``) reads a tensor once for its
statistics and once for the result, and the two tensors of a backward likewise. Weights and statistics are in fp32, as
under autocast.

The CPU kernels are replaced below autograd and the transforms of torch.func, so double backward, hooks, checkpoints and
vmap are torch's own.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels import override
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import DENSE, FLOATS, FP32, NHWC, attempt, empty, is_plain
from nano_loop.kernels.override import BF16, COMPILED, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.patching.ownership import rules_now

#: Minimum number of contiguous elements: channels in NHWC, pixels in NCHW, elements of a row.
_FEW = 16
#: Minimum number of pixels of an NCHW image for a forward, by dtype: with fewer, torch's kernel was faster.
_FEW_PIXELS = {torch.bfloat16: 128, torch.float32: 48}
_DTYPES = tuple(_FEW_PIXELS)
#: Minimum number of elements. Below it, the Python overhead exceeds the gain with several threads, in any layout.
MIN_ELEMENTS = 1 << 18


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


_DENSE, _PARAMETERS, _STATISTICS = FLOATS._replace(layout=DENSE), (FP32, FP32), (FP32, FP32)
_FORWARD = (_DENSE, *_PARAMETERS, _DENSE, *_STATISTICS)
_BACKWARD = (_DENSE, _DENSE, FP32, *_STATISTICS, _DENSE, *_PARAMETERS)
KERNEL = CompiledKernel(
    "norms",
    {
        "batch_norm": (_DENSE, *_PARAMETERS, *_STATISTICS, _DENSE, *_STATISTICS),
        **dict.fromkeys(("group_norm", "layer_norm"), _FORWARD),
        **dict.fromkeys(("batch_norm_backward", "group_norm_backward", "layer_norm_backward"), _BACKWARD),
    },
)
_MANY_CHANNELS, _MANY_PIXELS = 512, 128
_TRAINING = 4  # index of `training` after the input of a batch norm
#: By function name: whether a norm of fp32 tensors may be 1.1 times as fast as torch's kernel, given its arguments.
_FASTER_IN_FP32: Mapping[str, Callable[..., bool]] = {
    "batch_norm": lambda x, *others: others[_TRAINING] and (x.is_contiguous() or x.size(1) <= _MANY_CHANNELS),
    "batch_norm_backward": lambda _, x, *others: x.is_contiguous(),
    "group_norm": lambda *_: False,
    "group_norm_backward": lambda _, x, *others: not x.is_contiguous() and x[0, 0].numel() >= _MANY_PIXELS,
    "layer_norm": lambda *_: True,
    "layer_norm_backward": lambda *_: False,
}

_Results = tuple[Tensor | None, Tensor | None, Tensor | None]
#: Accepts the arguments of an operator. Returns its results, or None if torch must compute them.
_Compute = Callable[..., _Results | None]


def _supports(name: str, kernel: Kernel, *args: Any) -> Call | None:
    x: Tensor = args[int(name.endswith("backward"))]  # after the gradient
    if x.numel() < MIN_ELEMENTS:
        return None
    if x.dtype is torch.float32 and not _FASTER_IN_FP32[name](*args):
        return None
    return Call(name, args[:1], args[1:], kernel, timed=_with_copies if name == "batch_norm" else None)


def _computed(compute: _Compute, call: Call) -> _Results | None:
    return compute(*call.tensors, *call.numbers)


def _with_copies(call: Call) -> Call | None:
    """Return a batch norm that does not modify the running statistics."""
    weight, bias, *args = call.numbers
    copies = [None if running is None else running.clone() for running in args[:2]]
    return call._replace(numbers=(weight, bias, *copies, *args[2:])) if call.is_measurable else None


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    exchange: Exchange | None = None,
) -> _Results | None:
    """Compute ``aten::native_batch_norm`` of a batch, or of a part with `exchange`, or return None if torch must."""
    layout = layout_of(x)
    # All of these determine the dtype of the statistics.
    parameters = (weight, bias, running_mean, running_var)
    if layout is None or not training or not layout.has_fast_forward or not are_fp32(layout.channels, *parameters):
        return None
    if not has_fp32_statistics(x, *parameters):
        return None
    results = torch.empty_like(x), empty(layout.channels), empty(layout.channels)
    shape, numbers = shape_of(x, layout, together=True), (float(momentum), float(eps))
    with exchanging(shape, exchange):
        is_done = KERNEL("batch_norm", shape, x, *parameters, *numbers, *results)
    return results if is_done else None


def batch_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    means: Tensor | None,
    inverses: Tensor | None,
    training: bool,
    eps: float,
    mask: Sequence[bool],
    exchange: Exchange | None = None,
) -> _Results | None:
    """Compute ``aten::native_batch_norm_backward`` in the same way."""
    layout = layout_of(x)
    if layout is None or not training or means is None or not are_fp32(layout.channels, weight, means, inverses):
        return None
    shape = shape_of(x, layout, together=True)
    if override.is_copy(gradient, x):
        shape.bf16 = 2  # MIXED
    with exchanging(shape, exchange):
        return _gradients("batch_norm", (shape,), gradient, x, weight, means, inverses, mask)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    images: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> _Results | None:
    """Compute ``aten::native_group_norm``, or return None if torch must."""
    layout = layout_of(x)
    if layout is None or not layout.has_fast_forward or not are_fp32(channels, weight, bias):
        return None
    if not has_fp32_statistics(x, weight, bias) or not layout.has_groups(images, channels, pixels, groups):
        return None
    results = torch.empty_like(x), empty(images, groups), empty(images, groups)
    is_done = KERNEL("group_norm", shape_of(x, layout), groups, x, weight, bias, float(eps), *results)
    return results if is_done else None


def group_norm_backward(
    gradient: Tensor,
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    weight: Tensor | None,
    images: int,
    channels: int,
    pixels: int,
    groups: int,
    mask: Sequence[bool],
) -> _Results | None:
    """Compute ``aten::native_group_norm_backward`` in the same way."""
    layout = layout_of(x)
    if layout is None or not layout.has_groups(images, channels, pixels, groups) or not are_fp32(channels, weight):
        return None
    if not are_fp32(images * groups, means, inverses):
        return None
    sizes = shape_of(x, layout), groups
    return _gradients("group_norm", sizes, gradient, x, weight, means, inverses, mask)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> _Results | None:
    """Compute ``aten::native_layer_norm``, or return None if torch must."""
    if not supports_rows(x, shape) or not are_fp32(math.prod(shape), weight, bias):
        return None
    x, rows = x.contiguous(), x.shape[: x.dim() - len(shape)]
    out, means, inverses = torch.empty_like(x), *(empty(*rows, *[1] * len(shape)) for _ in range(2))
    KERNEL("layer_norm", x, *rows_of(x, shape), weight, bias, float(eps), out, means, inverses)
    if weight is None and bias is None:  # torch's statistics then have the input's dtype
        return out, means.to(x.dtype), inverses.to(x.dtype)
    return out, means, inverses


def layer_norm_backward(
    gradient: Tensor,
    x: Tensor,
    shape: Sequence[int],
    means: Tensor,
    inverses: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> _Results | None:
    """Compute ``aten::native_layer_norm_backward`` in the same way."""
    if not supports_rows(x, shape) or not are_fp32(math.prod(shape), weight, bias):
        return None
    x, means, inverses, rows = x.contiguous(), means.float(), inverses.float(), rows_of(x, shape)
    if not are_fp32(rows[0], means, inverses):
        return None
    return _gradients("layer_norm", rows, gradient, x, weight, means, inverses, mask)


def _reads_copy(call: Call) -> bool:
    """Whether this is a backward with a bf16 copy of the input; see `nano_loop.kernels.narrow_copies`."""
    return override.is_copy(call.tensors[0], call.numbers[0])


OVERRIDES = tuple(
    Override(
        f"native_{compute.__name__}",
        (
            Algorithm(COMPILED, functools.partial(_computed, compute), BF16, is_raced=False),
            Algorithm(
                *("mixed", functools.partial(_computed, compute), override.FP32), supports=_reads_copy, is_raced=False
            ),
            Algorithm(
                *(COMPILED, functools.partial(_computed, compute), override.FP32),
                supports=lambda call: not _reads_copy(call),
                kernel=KERNEL.name,
            ),
        ),
        functools.partial(_supports, compute.__name__),
        reads_copies=compute is batch_norm_backward,
    )
    for compute in (
        *(batch_norm, batch_norm_backward, group_norm, group_norm_backward),
        *(layer_norm, layer_norm_backward),
    )
)


def of_part(compute: _Compute, exchange: Exchange, *args: Any) -> _Results | None:
    """Call a batch norm's function for a part of a batch, if the rules allow it, exchanging unless torch computes."""
    rules = rules_now()
    return attempt(compute, *args, exchange) if rules is not None and KERNEL.name in rules.kernels else None


def _gradients(
    norm: str,
    sizes: tuple[Any, ...],
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    means: Tensor,
    inverses: Tensor | None,
    mask: Sequence[bool],
) -> _Results | None:
    """Call a backward of ``norms.c`` for the gradients of input, weight and bias that `mask` requests."""
    is_mixed = norm == "batch_norm" and override.is_copy(gradient, x)
    if not (gradient.dtype is x.dtype or is_mixed) or gradient.layout is not torch.strided or inverses is None:
        return None
    form = torch.contiguous_format if x.is_contiguous() else NHWC[x.dim()]
    gradient, means, inverses = gradient.contiguous(memory_format=form), means.contiguous(), inverses.contiguous()
    weights = weight.shape if weight is not None else (sizes[1] if norm == "layer_norm" else x.size(1),)
    weight_gradient, bias_gradient = (empty(*weights) if is_needed else None for is_needed in mask[1:])
    input_gradient = torch.empty_like(x, dtype=gradient.dtype) if mask[0] else None
    gradients = input_gradient, weight_gradient, bias_gradient
    first = (gradient, x, *sizes) if norm == "layer_norm" else (*sizes, gradient, x)
    return gradients if KERNEL(f"{norm}_backward", *first, weight, means, inverses, *gradients) else None
