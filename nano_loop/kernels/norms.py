"""Batch norm, group norm and layer norm at the rate of the memory, forward and backward, of tensors in fp32 or bf16.

torch's kernels convert bf16 element by element, or compute in one thread for each group, and reach a tenth to a half of
the memory's rate. A C function (``norms.c``) reads a tensor for its statistics and again for the result, and the two
tensors of a backward likewise. Weights and statistics are in fp32, as under autocast.

The kernels for the CPU are replaced, below autograd and the transforms of torch.func. So derivatives of derivatives,
hooks, checkpoints and vmap are torch's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.intercept.operators import overridden
from nano_loop.intercept.ownership import belongs_to_set_up_model
from nano_loop.kernels.compiled import UnavailableError, compiled_for_threads

#: Minimum number of elements. Below it, the Python overhead exceeds the gain, with several threads and in any layout.
WORTH_IT = 1 << 18
#: Minimum number of neighbours in memory: of channels in NHWC, of pixels in NCHW, of elements of a row.
_FEW = 16
#: Minimum number of pixels of an image in NCHW for a forward: with fewer, torch's kernel was faster.
_FEW_PIXELS = 128
_DTYPES = (torch.float32, torch.bfloat16)
_NHWC = {4: torch.channels_last, 5: torch.channels_last_3d}

_Results = tuple[Tensor | None, Tensor | None, Tensor | None]
#: Takes the arguments of an operator. Returns its results, or None where torch has to compute them.
_Ours = Callable[..., _Results | None]


class _Shape(ctypes.Structure):
    """How a tensor is read: ``Shape`` of ``norms.c``."""

    _fields_ = [(name, ctypes.c_int64) for name in ("segments", "rows", "channels", "nhwc", "bf16")]


class _Layout(NamedTuple):
    """The sizes and the memory format of a tensor of shape (N, C, *)."""

    images: int
    channels: int
    pixels: int
    format: torch.memory_format

    @property
    def is_nhwc(self) -> bool:
        """Whether channels are next to each other: they are where there is one pixel."""
        return self.pixels == 1 or self.format is not torch.contiguous_format

    @property
    def is_worth_a_forward(self) -> bool:
        """Whether statistics and outputs are computed faster than by torch's kernels."""
        return self.is_nhwc or self.pixels >= _FEW_PIXELS


def unavailable() -> str | None:
    """Return why these kernels cannot be used in this process, or None."""
    try:
        compiled_for_threads("norms")
    except UnavailableError as error:
        return str(error)
    return None


def _replacing(ours: _Ours) -> Callable[[Callable[..., Any] | None], Callable[..., Any]]:
    """Return the argument `make` of `overridden` for a function which may answer calls of set-up models."""

    def make(original: Callable[..., Any] | None) -> Callable[..., Any]:
        assert original is not None

        def dispatched(keys: torch.DispatchKeySet, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.numel() >= WORTH_IT and not kwargs and belongs_to_set_up_model():
                found = ours(x, *args)
                if found is not None:
                    return found
            return original(keys, x, *args, **kwargs)

        return dispatched

    return make


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _Results | None:
    """Compute ``aten::native_batch_norm`` by the statistics of the batch, or return None where torch has to."""
    layout = _layout(x)
    # The dtype of the statistics follows from all of these.
    parameters = (weight, bias, running_mean, running_var)
    if layout is None or not training or not layout.is_worth_a_forward or not _are_fp32(x, *parameters):
        return None
    out, means, inverses = torch.empty_like(x), *(torch.empty(layout.channels) for _ in range(2))
    numbers = ctypes.c_double(momentum), ctypes.c_double(eps)
    outputs = map(_pointer, (out, means, inverses))
    shape = _shape(x, layout, together=True)
    if not _library().batch_norm(shape, _pointer(x), *map(_pointer, parameters), *numbers, *outputs, _threads()):
        return None
    return out, means, inverses


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
) -> _Results | None:
    """Compute ``aten::native_batch_norm_backward``, likewise."""
    layout = _layout(x)
    if layout is None or not training or means is None or not _are_fp32(x, weight, means, inverses):
        return None
    return _gradients("batch_norm", (_shape(x, layout, together=True),), gradient, x, weight, means, inverses, mask)


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
    """Compute ``aten::native_group_norm``, or return None where torch has to."""
    layout = _layout(x)
    if layout is None or not layout.is_worth_a_forward or not _are_fp32(x, weight, bias):
        return None
    out, means, inverses = torch.empty_like(x), *(torch.empty(images, groups) for _ in range(2))
    inputs, outputs = map(_pointer, (x, weight, bias)), map(_pointer, (out, means, inverses))
    arguments = (_shape(x, layout), ctypes.c_int64(groups), *inputs, ctypes.c_double(eps), *outputs)
    return (out, means, inverses) if _library().group_norm(*arguments, _threads()) else None


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
    """Compute ``aten::native_group_norm_backward``, likewise."""
    layout = _layout(x)
    if layout is None or not _are_fp32(x, weight, means, inverses):
        return None
    sizes = _shape(x, layout), ctypes.c_int64(groups)
    return _gradients("group_norm", sizes, gradient, x, weight, means, inverses, mask)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> _Results | None:
    """Compute ``aten::native_layer_norm``, or return None where torch has to."""
    if not _fits_rows(x, shape) or not all(each is None or _is_fp32(each) for each in (weight, bias)):
        return None
    x, rows = x.contiguous(), x.shape[: x.dim() - len(shape)]
    out, means, inverses = torch.empty_like(x), *(torch.empty(*rows, *[1] * len(shape)) for _ in range(2))
    outputs = map(_pointer, (out, means, inverses))
    arguments = (*_rows(x, shape), _pointer(weight), _pointer(bias), ctypes.c_double(eps), *outputs)
    _library().layer_norm(_pointer(x), *arguments, _threads())
    if weight is None and bias is None:  # torch's statistics have the dtype of the input then
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
    """Compute ``aten::native_layer_norm_backward``, likewise."""
    if not _fits_rows(x, shape) or not all(each is None or _is_fp32(each) for each in (weight, bias)):
        return None
    x, means, inverses = x.contiguous(), means.float(), inverses.float()
    return _gradients("layer_norm", _rows(x, shape), gradient, x, weight, means, inverses, mask)


_REPLACEMENTS = {
    f"native_{ours.__name__}": _replacing(ours)
    for ours in (
        *(batch_norm, batch_norm_backward, group_norm, group_norm_backward),
        *(layer_norm, layer_norm_backward),
    )
}


_users = 0


@contextmanager
def replaced() -> Iterator[None]:
    """Replace torch's kernels for the CPU. Calls that do not belong to a set-up model get torch's own results."""
    global _users
    with ExitStack() as stack:
        for operator, make in _REPLACEMENTS.items():
            stack.enter_context(overridden(operator, make, "CPU"))
        _users += 1
        try:
            yield
        finally:
            _users -= 1


def computes_group_norm(x: Tensor) -> bool:
    """Return whether a group norm of this input, with weights in fp32, is computed here in a set-up model."""
    layout = _layout(x) if _users and x.numel() >= WORTH_IT else None
    return layout is not None and layout.is_worth_a_forward


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
    """Call a backward of ``norms.c`` for the gradients of input, weight and bias that `mask` asks for."""
    if gradient.dtype is not x.dtype or gradient.layout is not torch.strided or inverses is None:
        return None
    form = torch.contiguous_format if x.is_contiguous() else _NHWC[x.dim()]
    gradient, means, inverses = gradient.contiguous(memory_format=form), means.contiguous(), inverses.contiguous()
    weights = weight.shape if weight is not None else _sizes_of_weights(norm, x, sizes)
    of_weight, of_bias = (torch.empty(weights) if each else None for each in mask[1:])
    found = torch.empty_like(x) if mask[0] else None, of_weight, of_bias
    first, tensors = map(_pointer, (gradient, x)), map(_pointer, (weight, means, inverses, *found))
    function = getattr(_library(), f"{norm}_backward")
    before = first if norm == "layer_norm" else sizes
    after = sizes if norm == "layer_norm" else first
    return found if function(*before, *after, *tensors, _threads()) else None


def _sizes_of_weights(norm: str, x: Tensor, sizes: tuple[Any, ...]) -> Sequence[int]:
    """Return the sizes of the gradients of a weight that there is not."""
    return (sizes[1].value if norm == "layer_norm" else x.size(1),)


def _layout(x: Tensor) -> _Layout | None:
    """Return how a tensor lies in memory, or None where torch has to compute."""
    if not _is_plain(x) or x.dim() < 2:
        return None
    if x.is_contiguous():
        form = torch.contiguous_format
    elif x.dim() in _NHWC and x.is_contiguous(memory_format=_NHWC[x.dim()]):
        form = _NHWC[x.dim()]
    else:
        return None
    found = _Layout(x.size(0), x.size(1), math.prod(x.shape[2:]), form)
    return found if (found.channels if found.is_nhwc else found.pixels) >= _FEW else None


def _shape(x: Tensor, layout: _Layout, together: bool = False) -> Any:
    """Return the ``Shape``. Images in NHWC that have their statistics together are one segment."""
    one = together and layout.is_nhwc
    segments, rows = (1, layout.images * layout.pixels) if one else (layout.images, layout.pixels)
    return ctypes.byref(_Shape(segments, rows, layout.channels, layout.is_nhwc, x.dtype is torch.bfloat16))


def _fits_rows(x: Tensor, shape: Sequence[int]) -> bool:
    return _is_plain(x) and tuple(x.shape[x.dim() - len(shape) :]) == tuple(shape) and math.prod(shape) >= _FEW


def _rows(x: Tensor, shape: Sequence[int]) -> tuple[ctypes.c_int64, ...]:
    width = math.prod(shape)
    return ctypes.c_int64(x.numel() // width), ctypes.c_int64(width), ctypes.c_int64(x.dtype is torch.bfloat16)


def _is_plain(x: Tensor) -> bool:
    return x.dtype in _DTYPES and x.layout is torch.strided and x.is_cpu and not x.is_neg()


def _are_fp32(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether all weights and statistics that there are are in fp32, and torch's results would be.

    That of a bf16 input without any of them has statistics in bf16.
    """
    given = [each for each in parameters if each is not None]
    return all(map(_is_fp32, given)) and (bool(given) or x.dtype is torch.float32)


def _is_fp32(each: Tensor) -> bool:
    return each.dtype is torch.float32 and each.is_contiguous() and each.is_cpu


def _library() -> Any:
    return compiled_for_threads("norms")


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def _threads() -> ctypes.c_int:
    return ctypes.c_int(torch.get_num_threads())
