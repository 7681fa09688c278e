"""Gradients of bf16 convolutions by a C function, by matrix products and sums, or in fp32, where oneDNN's are slow.

oneDNN computes a weight's gradient image by image. The C function of `nano_loop.kernels.convolution.weight_gradient` is
faster on CPUs with AVX-512's bf16 instructions. On others, for images with few pixels, and for 1×1 kernels, a single
product over the pixels of all images is. For the bias of a transposed convolution, oneDNN's sum takes several times as
long as the rest of the backward. C functions compute those of depthwise convolutions in NHWC. Others with a
stride or a large kernel, and convolutions in many groups, are up to ten times as fast in fp32, casts included.
docs/measurements.md has the times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_loop.kernels.convolution import blocked_convolution, depthwise, weight_gradient
from nano_loop.kernels.convolution.gradient_plans import (
    Arguments,
    Plan,
    first_guess,
    for_blocks,
    is_depthwise,
    pixels_of,
    plans,
)
from nano_loop.kernels.convolution.rounded_convolution import may_be_rounded
from nano_loop.kernels.fp16 import in_fp16
from nano_loop.kernels.memory import attempt, is_plain
from nano_loop.kernels.replacement import Arguments as Product
from nano_loop.kernels.replacement import Choose, Replacement
from nano_loop.patching.ownership import belongs_to_set_up_model, rule_for
from nano_loop.policy.policy import CONVOLUTION
from nano_loop.policy.products import rounds

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

#: The operator, without its overload.
OPERATOR = "convolution_backward"


def for_set_up_models(original: Callable[..., Any] | None) -> Callable[..., _Gradients]:
    """Return the replacement of the CPU kernel of ``aten::convolution_backward``.

    Backwards that do not belong to a set-up model return torch's own result, bitwise identical. A rule of the set-up
    model for the operator chooses the plan by its name; see `nano_loop.kernels.replacement.Choose`.

    Parameters
    ----------
    original : callable
        The original kernel. None is not supported.
    """
    assert original is not None

    def dispatched(keys: torch.DispatchKeySet, *args: Any) -> _Gradients:
        call = Arguments(*args)
        multiplications = pixels_of(call) * call.weight.numel()
        factors = in_fp16(CONVOLUTION, multiplications, *call[:3])
        if factors is not None:
            return _of_rounded(functools.partial(original, keys), call, factors)
        if may_be_rounded(call.inputs, call.weight, multiplications, call.groups):

            def in_fp32(*tensors: Tensor) -> _Gradients:
                gradients: _Gradients = original(keys, *tensors, *call[3:])
                return gradients

            def rounded(*tensors: Tensor) -> _Gradients:
                return faster_backward(original, rule_for(OPERATOR), rounds_inputs=True)(keys, *tensors, *call[3:])

            product = Product(f"gradients of a {CONVOLUTION}", call[:3], call[3:])
            is_rounded = rounds(CONVOLUTION, multiplications, product, in_fp32, rounded)
            return (rounded if is_rounded else in_fp32)(*call[:3])
        if belongs_to_set_up_model():
            return faster_backward(original, rule_for(OPERATOR))(keys, *args)
        gradients: _Gradients = original(keys, *args)
        return gradients

    return dispatched


REPLACEMENTS = (Replacement(OPERATOR, for_set_up_models),)


def faster_backward(
    kernel: Callable[..., _Gradients], choose: Choose | None = None, *, rounds_inputs: bool = False
) -> Callable[..., _Gradients]:
    """Return a function that computes some gradients of bf16 convolutions faster than the CPU's kernel.

    Parameters
    ----------
    kernel : callable
        The original kernel, which computes the remaining gradients.
    choose : callable, optional
        Chooses one of `plans` by its name. By default it is that of `first_guess`.
    rounds_inputs : bool
        Whether it takes tensors in fp32 instead, which are rounded to bf16. The gradients are in fp32.

    Returns
    -------
    callable
        Takes the dispatch key set, followed by the arguments of the operator. Returns the gradients of input, weight
        and bias, in their dtypes, and None for each that is not requested. Products and sums are accumulated in fp32,
        as in oneDNN, in a different order.
    """

    def backward(keys: torch.DispatchKeySet, *args: Any) -> _Gradients:
        call = Arguments(*args)
        in_fp32 = not rounds_inputs and call.weight.dtype is torch.float32 and is_depthwise(call)
        if not _are_plain(torch.float32 if rounds_inputs or in_fp32 else torch.bfloat16, *call[:3]):
            return kernel(keys, *args)

        def by_plan(plan: Plan, *arguments: Any) -> _Gradients:
            return _by_plan(plan, kernel, keys, Arguments(*arguments), rounds_inputs)

        def algorithms() -> dict[str, Callable[..., _Gradients]]:
            return {plan.name: functools.partial(by_plan, plan) for plan in {*plans(call), first_guess(call)}}

        plan = Plan("torch", "depthwise") if in_fp32 and call.output_mask[1] else first_guess(call)
        if choose is not None and not in_fp32:
            plan = Plan(*choose(call, algorithms, plan.name).split("/"))
        computed = attempt(by_plan, plan, *call)
        return kernel(keys, *args) if computed is None else computed

    return backward


def _of_rounded(kernel: Callable[..., _Gradients], call: Arguments, factors: Sequence[Tensor]) -> _Gradients:
    """Return the gradients by torch's kernel, of factors that were rounded. The bias's is no product."""
    *needs, needs_bias = call.output_mask
    *gradients, _ = kernel(*factors, *call.geometry, [*needs, False]) if any(needs) else (None, None, None)
    return gradients[0], gradients[1], _sum_of_pixels(call.gradient) if needs_bias else None


def _sum_of_pixels(gradient: Tensor) -> Tensor:
    return gradient.sum([0, *range(2, gradient.dim())])


def _by_plan(
    plan: Plan, kernel: Callable[..., _Gradients], keys: torch.DispatchKeySet, call: Arguments, rounds_inputs: bool
) -> _Gradients:
    needs_inputs, _, needs_bias = call.output_mask
    dtype, exact = call.weight.dtype, call.gradient
    ours: list[Tensor | None] = [None, None, None]
    geometry = weight_gradient.Geometry(call.weight.shape[2:], *call[4:7])
    if plan.inputs == "depthwise":
        ours[0] = depthwise.input_gradient(*call[:3], geometry)
    if plan.weight == "depthwise":
        ours[1] = depthwise.weight_gradient(*call[:2], geometry)
    fp32 = plan.inputs == "fp32", plan.weight == "fp32"
    if rounds_inputs and needs_inputs and not fp32[0]:
        ours[0] = _input_gradient_in_blocks(call)
        if ours[0] is None:
            call = call._replace(gradient=exact.bfloat16())  # which both gradients read
    if plan.weight == "product":
        ours[1] = _weight_gradient(call, torch.bfloat16 if rounds_inputs else dtype)
    elif plan.weight == "blocks":
        ours[1] = weight_gradient.weight_gradient(*for_blocks(call), in_nchw=call.weight.is_contiguous())
    # oneDNN computes the weight's gradient again where the bias's is asked for.
    if needs_bias and (rounds_inputs or plan.weight != "torch" or call.transposed):
        ours[2] = _sum_of_pixels(exact)
    if any(fp32):
        computed = _partly_in_fp32(kernel, keys, call._replace(gradient=exact), fp32)
        ours = [own if other is None else other for own, other in zip(ours, computed, strict=True)]
    missing = [is_needed and computed is None for is_needed, computed in zip(call.output_mask, ours, strict=True)]
    if any(missing):
        gradient, inputs, weight = call[:3]
        if rounds_inputs:
            inputs = inputs.bfloat16() if missing[1] else _shaped_like(inputs, torch.bfloat16)
            gradient, weight = gradient.bfloat16(), weight.bfloat16()
        others = kernel(keys, gradient, inputs, weight, *call.geometry, missing)
        ours = [b if is_needed else a for a, b, is_needed in zip(ours, others, missing, strict=True)]
    for_inputs, for_weight, for_bias = [None if tensor is None else tensor.to(dtype) for tensor in ours]
    return for_inputs, for_weight, for_bias


def _input_gradient_in_blocks(call: Arguments) -> Tensor | None:
    """Return the inputs' gradient with rounded products by AMX, or None where it cannot compute it."""
    gradient, inputs, weight, _, stride, padding, dilation, transposed, *_ = call
    geometry, sizes = weight_gradient.Geometry(weight.shape[2:], stride, padding, dilation), inputs.shape[2:]
    if transposed or not blocked_convolution.supports_gradient(gradient, weight, geometry, sizes):
        return None
    return blocked_convolution.input_gradient(gradient, weight, geometry, sizes)


def _shaped_like(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what stands for the inputs where their gradient alone is computed, which depends on their layout alone."""
    return torch.empty_like(inputs, dtype=dtype)


def _are_plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether all tensors are plain ones of this dtype, and products in bf16 would not have another one."""
    if not all(is_plain(tensor, (dtype,)) for tensor in tensors):
        return False
    # Inside a user's autocast to another dtype, the products would have that dtype.
    return not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is torch.bfloat16


def _partly_in_fp32(
    kernel: Callable[..., _Gradients], keys: torch.DispatchKeySet, call: Arguments, mask: tuple[bool, bool]
) -> _Gradients:
    """Return the gradients of inputs and weight that are asked for, computed in fp32."""
    gradient, inputs, weight = call[:3]
    inputs = inputs.float() if mask[1] else _shaped_like(inputs, torch.float32)
    return kernel(keys, gradient.float(), inputs, weight.float(), *call.geometry, [*mask, False])


def _weight_gradient(call: Arguments, dtype: torch.dtype) -> Tensor:
    """Return the weight's gradient: the output's gradient times the unfolded input, both in this dtype."""
    _, _, weight, _, stride, padding, dilation, *_ = call
    gradient, inputs = (tensor.to(dtype) for tensor in call[:2])
    outputs, channels, height, width = weight.shape
    images = inputs.permute(0, 2, 3, 1)
    if any(padding):
        images = F.pad(images, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    image, row, column, channel = images.stride()
    of_pixels = (row * stride[0], column * stride[1])
    of_kernel = (row * dilation[0], column * dilation[1])
    windows = images.as_strided(
        (gradient.size(0), *gradient.shape[2:], height, width, channels), (image, *of_pixels, *of_kernel, channel)
    )
    columns = windows.reshape(-1, height * width * channels)
    product = gradient.permute(0, 2, 3, 1).reshape(-1, outputs).t() @ columns
    return product.view(outputs, height, width, channels).permute(0, 3, 1, 2)
