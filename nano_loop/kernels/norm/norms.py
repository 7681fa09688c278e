"""Batch norm, group norm and layer norm at memory bandwidth, forward and backward, for fp32 and bf16 tensors.

torch's kernels convert bf16 element by element or use one thread per group, and reach a tenth to half of the memory
bandwidth. Many fp32 kernels reach all of it and are kept. A C function (``norms.c``) reads a tensor once for its
statistics and once for the result, and the two tensors of a backward likewise. Weights and statistics are in fp32, as
under autocast.

The CPU kernels are replaced below autograd and the transforms of torch.func, so double backward, hooks, checkpoints and
vmap are torch's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import override
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import DENSE, FLOATS, FP32, attempt, empty
from nano_loop.kernels.norm import norm_arguments
from nano_loop.kernels.norm.norm_arguments import (
    NHWC,
    Exchange,
    are_fp32,
    exchanging,
    has_fp32_statistics,
    layout_of,
    rows_of,
    shape_of,
    supports_rows,
)
from nano_loop.kernels.override import BF16, COMPILED, Algorithm, Call, Override
from nano_loop.patching.operators.operators import Kernel
from nano_loop.patching.ownership import rules_now

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
#: By function name: whether a norm of fp32 tensors may be at least 1.1 times as fast as torch's kernel, given its
#: arguments.
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
    if x.numel() < norm_arguments.MIN_ELEMENTS:
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
    """Compute ``aten::native_batch_norm`` with batch statistics, or return None if torch must.

    If `exchange` is passed, `x` is a part of the batch.
    """
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


OVERRIDES = tuple(
    Override(
        f"native_{compute.__name__}",
        (
            Algorithm(COMPILED, functools.partial(_computed, compute), BF16, is_raced=False),
            Algorithm(COMPILED, functools.partial(_computed, compute), override.FP32, kernel=KERNEL.name),
        ),
        functools.partial(_supports, compute.__name__),
    )
    for compute in (
        *(batch_norm, batch_norm_backward, group_norm, group_norm_backward),
        *(layer_norm, layer_norm_backward),
    )
)


def of_part(compute: _Compute, exchange: Exchange, *args: Any) -> _Results | None:
    """Call `batch_norm` or `batch_norm_backward` for a part of a batch, if the model's rules allow it.

    `exchange` is not called if torch must compute.
    """
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
    if gradient.dtype is not x.dtype or gradient.layout is not torch.strided or inverses is None:
        return None
    form = torch.contiguous_format if x.is_contiguous() else NHWC[x.dim()]
    gradient, means, inverses = gradient.contiguous(memory_format=form), means.contiguous(), inverses.contiguous()
    weights = weight.shape if weight is not None else (sizes[1] if norm == "layer_norm" else x.size(1),)
    weight_gradient, bias_gradient = (empty(*weights) if is_needed else None for is_needed in mask[1:])
    gradients = torch.empty_like(x) if mask[0] else None, weight_gradient, bias_gradient
    first = (gradient, x, *sizes) if norm == "layer_norm" else (*sizes, gradient, x)
    return gradients if KERNEL(f"{norm}_backward", *first, weight, means, inverses, *gradients) else None
