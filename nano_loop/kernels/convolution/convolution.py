"""Gradients of bf16 convolutions by C functions, by sums, or in fp32, where oneDNN's are slow.

oneDNN computes a weight gradient image by image. The C function of `nano_loop.kernels.convolution.weight_gradient` is
faster on CPUs with the bf16 instructions of AVX-512. For the bias of a transposed convolution, oneDNN's sum takes
several times as long as the rest of the backward. C functions compute the gradients of depthwise convolutions in NHWC.
Other convolutions with a stride or a large kernel, and those with many groups, are up to ten times as fast in fp32,
including the casts. See docs/measurements.md for the times.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import override
from nano_loop.kernels.convolution import depthwise, weight_gradient
from nano_loop.kernels.convolution.gradient_plans import (
    Arguments,
    Plan,
    first_guess,
    for_blocks,
    is_depthwise,
    pixels_of,
    plans,
)
from nano_loop.kernels.convolution.rounded_convolution import can_round
from nano_loop.kernels.memory import is_plain
from nano_loop.kernels.override import FP32, REFERENCE, ROUNDED, Algorithm, Call, Compute, Override, choose
from nano_loop.patching.operators import Kernel
from nano_loop.patching.ownership import NO_RULES, rules_now
from nano_loop.policy.product_precision import CONVOLUTION

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _supports(kernel: Kernel, *args: Any) -> Call:
    call = Arguments(*args)
    return Call("gradients of convolution", call[:3], call[3:], kernel, pixels_of(call) * call.weight.numel())


def _by_plans(call: Call, *, rounds_inputs: bool = False) -> _Gradients | None:
    """Compute some gradients of ``aten::convolution_backward`` faster than the CPU kernel, which computes the others.

    Sums are accumulated in fp32, as in oneDNN, but in a different order. If `rounds_inputs`, fp32 tensors are rounded
    to bf16.
    """
    arguments = Arguments(*call.tensors, *call.numbers)
    in_fp32 = not rounds_inputs and arguments.weight.dtype is torch.float32 and is_depthwise(arguments)
    tensors = (arguments.gradient, arguments.weight) if rounds_inputs else call.tensors  # the inputs may be a copy
    if not _are_plain(torch.float32 if rounds_inputs or in_fp32 else torch.bfloat16, *tensors):
        return None
    guess = first_guess(arguments)
    if in_fp32 and arguments.output_mask[1]:
        guess = Plan("torch", "depthwise")
    if in_fp32:
        return _by_plan(call, guess)

    def algorithms() -> dict[str, Compute]:
        wanted = {*plans(arguments), guess}
        by_name: dict[str, Compute] = {
            plan.name: functools.partial(_by_plan, plan=plan, rounds_inputs=rounds_inputs) for plan in wanted
        }
        if any("fp32" in name for name in by_name):
            all_in_fp32 = Plan(*("fp32" if is_needed else "torch" for is_needed in arguments.output_mask[:2]))
            by_name[REFERENCE] = by_name.get(all_in_fp32.name, functools.partial(_by_plan, plan=Plan()))
        return by_name

    def timed(call: Call) -> Call | None:
        """Return a call without the gradient that all plans compute the same way."""
        *geometry, (needs_inputs, *others) = call.numbers
        differ = len({plan.inputs for plan in (*plans(arguments), guess)}) > 1
        return call._replace(numbers=(*geometry, [needs_inputs and differ, *others])) if call.is_measurable else None

    as_timed = call._replace(operator=f"{call.operator}, rounded") if rounds_inputs else call
    chosen = choose(rules_now() or NO_RULES, as_timed._replace(numbers_in="bf16", timed=timed), algorithms, guess.name)
    return _by_plan(call, Plan(*chosen.split("/")), rounds_inputs=rounds_inputs)


_by_rounded_plans = functools.partial(_by_plans, rounds_inputs=True)


def _of_rounded(call: Call, factors: Sequence[Tensor]) -> _Gradients:
    """Return torch's gradients of rounded factors. The bias gradient is not a product and is not rounded."""
    *geometry, (*needs, needs_bias) = call.numbers
    assert call.kernel is not None
    *gradients, _ = call.kernel(*factors, *geometry, [*needs, False]) if any(needs) else (None, None, None)
    return gradients[0], gradients[1], _sum_of_pixels(call.tensors[0]) if needs_bias else None


def _by_torch(call: Call) -> _Gradients:
    return override.by_kernel(call._replace(tensors=tuple(override.in_fp32(call.tensors))))  # type: ignore[no-any-return]


OVERRIDES = (
    Override(
        "convolution_backward",
        (
            Algorithm(ROUNDED, _by_rounded_plans, FP32, False, lambda call: can_round(call, 1, call.numbers[-2])),
            Algorithm("plans", _by_plans, (torch.bfloat16, torch.float32), is_raced=False),
        ),
        _supports,
        by_torch=_by_torch,
        product=CONVOLUTION,
        factors=3,
        in_fp16=_of_rounded,
        reads_copies=True,
        keeps_rounded=True,
    ),
)


def _sum_of_pixels(gradient: Tensor) -> Tensor:
    return gradient.sum([0, *range(2, gradient.dim())])


def _by_plan(of: Call, plan: Plan, rounds_inputs: bool = False) -> _Gradients:
    call, kernel = Arguments(*of.tensors, *of.numbers), of.kernel
    assert kernel is not None
    needs_inputs, _, needs_bias = call.output_mask
    dtype, exact = call.weight.dtype, call.gradient
    ours: list[Tensor | None] = [None, None, None]
    if plan.inputs == "depthwise":
        ours[0] = depthwise.input_gradient(*call[:3], call.kernel)
    if plan.weight == "depthwise":
        ours[1] = depthwise.weight_gradient(*call[:2], call.kernel)
    fp32 = plan.inputs == "fp32", plan.weight == "fp32"
    if rounds_inputs and needs_inputs and not fp32[0]:
        call = call._replace(gradient=exact.bfloat16())  # shared by both gradients
    if plan.weight == "blocks":
        ours[1] = weight_gradient.weight_gradient(*for_blocks(call), in_nchw=call.weight.is_contiguous())
    # oneDNN recomputes the weight gradient if the bias gradient is requested.
    if needs_bias and (rounds_inputs or plan.weight != "torch" or call.transposed):
        ours[2] = _sum_of_pixels(exact)
    if any(fp32):
        computed = _partly_in_fp32(kernel, call._replace(gradient=exact), fp32)
        ours = [own if other is None else other for own, other in zip(ours, computed, strict=True)]
    missing = [is_needed and computed is None for is_needed, computed in zip(call.output_mask, ours, strict=True)]
    if any(missing):
        gradient, inputs, weight = call[:3]
        if rounds_inputs:
            inputs = inputs.bfloat16() if missing[1] else _shaped_like(inputs, torch.bfloat16)
            gradient, weight = gradient.bfloat16(), weight.bfloat16()
        others = kernel(gradient, inputs, weight, *call.geometry, missing)
        ours = [b if is_needed else a for a, b, is_needed in zip(ours, others, missing, strict=True)]
    for_inputs, for_weight, for_bias = [None if tensor is None else tensor.to(dtype) for tensor in ours]
    return for_inputs, for_weight, for_bias


def _shaped_like(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a placeholder for the inputs: their gradient only depends on their layout."""
    return torch.empty_like(inputs, dtype=dtype)


def _are_plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether all tensors are plain tensors of this dtype, and bf16 products would not get another dtype."""
    if not all(is_plain(tensor, (dtype,)) for tensor in tensors):
        return False
    # A user's autocast to another dtype would change the dtype of the products.
    return not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is torch.bfloat16


def _partly_in_fp32(kernel: Kernel, call: Arguments, mask: tuple[bool, bool]) -> _Gradients:
    """Return the requested gradients of inputs and weight, computed in fp32."""
    gradient, inputs, weight = call[:3]
    inputs = inputs.float() if mask[1] else _shaped_like(inputs, torch.float32)
    gradients: _Gradients = kernel(gradient.float(), inputs, weight.float(), *call.geometry, [*mask, False])
    return gradients
