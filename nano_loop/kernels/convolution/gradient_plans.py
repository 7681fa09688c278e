"""The algorithms for the gradients of a convolution, and the default one, used until any has been measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nano_loop.kernels.convolution import depthwise, weight_gradient
from nano_loop.kernels.convolution.weight_gradient import Geometry

#: Minimum number of multiplications. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 25
#: Minimum odd number of images for the blocked function, which pairs images: the last one counts twice.
_ODD_IMAGES = 7
#: Minimum number of kernel positions for which a depthwise weight gradient was faster in fp32, in NHWC and in NCHW.
_POSITIONS, _POSITIONS_IN_NCHW = 25, 49
#: Minimum number of output elements for gradients in fp32. Below it, the Python overhead exceeds the gain.
MIN_ELEMENTS = 1 << 12
#: Maximum channels per group, and minimum output elements, for which a weight gradient was faster in fp32.
_CHANNELS_OF_A_GROUP, _ELEMENTS_OF_GROUPS = 8, 1 << 20
#: Maximum output channels for which the input gradient of a transposed convolution in NCHW was faster in fp32.
_CHANNELS_OF_AN_IMAGE = 3
#: Maximum input or output channels for which fp32 may be faster without groups.
_FEW_CHANNELS = 4


class Plan(NamedTuple):
    """How gradients are computed: by "torch", in "fp32", or in C: "depthwise", or for weights in "blocks"."""

    inputs: str = "torch"
    weight: str = "torch"

    @property
    def name(self) -> str:
        """The name of the algorithm; that of torch's kernels if torch computes both gradients."""
        return "torch" if self == Plan() else "/".join(self)


class Arguments(NamedTuple):
    """The arguments of ``aten::convolution_backward``."""

    gradient: Tensor
    inputs: Tensor
    weight: Tensor
    bias_sizes: Sequence[int] | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int
    output_mask: Sequence[bool]

    @property
    def geometry(self) -> tuple[Any, ...]:
        """All arguments between the tensors and the output mask."""
        return self[3:-1]

    @property
    def kernel(self) -> Geometry:
        """The size, stride, padding and dilation of the kernel."""
        return Geometry(self.weight.shape[2:], self.stride, self.padding, self.dilation)


def first_guess(call: Arguments) -> Plan:
    """Return the plan that was the fastest on the machines in docs/measurements.md."""
    needs_inputs, needs_weight, _ = call.output_mask
    if is_depthwise(call):
        has_stride = needs_inputs and max(call.stride) > 1
        return Plan("depthwise" if has_stride else "torch", "depthwise" if needs_weight else "torch")
    in_fp32 = needs_inputs and _inputs_are_faster_in_fp32(call)
    how = "torch"
    if needs_weight and _blocks_are_faster(call):
        how = "blocks"
    elif needs_weight and not call.transposed and _weight_is_faster_in_fp32(call):
        how = "fp32"
    return Plan("fp32" if in_fp32 else "torch", how)


def plans(call: Arguments) -> list[Plan]:
    """Return the plans that may be the fastest; fp32 for few channels only: elsewhere even measuring is slow."""
    needs_inputs, needs_weight, _ = call.output_mask
    if is_depthwise(call):
        kinds = [["torch", "depthwise"] if is_needed else ["torch"] for is_needed in (needs_inputs, needs_weight)]
        return [Plan(*pair) for pair in itertools.product(*kinds)]
    fp32 = ["fp32"] if call.groups > 1 or min(call.weight.shape[:2]) <= _FEW_CHANNELS else []
    blocks = ["blocks"] if _blocks_support(call) else []
    inputs = ["torch", *fp32] if needs_inputs else ["torch"]
    weights = ["torch", *blocks, *([] if call.transposed else fp32)] if needs_weight else ["torch"]
    return [Plan(*pair) for pair in itertools.product(inputs, weights)]


def is_depthwise(call: Arguments) -> bool:
    """Whether the C functions for depthwise convolutions support the gradients."""
    return not call.transposed and depthwise.supports(*call[:3], call.kernel, call.groups)


def pixels_of(call: Arguments) -> int:
    """Return the number of pixels that are multiplied with the whole weight."""
    pixels = call.inputs if call.transposed else call.gradient
    return pixels.numel() // max(pixels.size(1), 1) if pixels.dim() > 1 else 0


def _inputs_are_faster_in_fp32(call: Arguments) -> bool:
    """Whether the input gradient is: strided or NDHWC depthwise, or transposed NCHW with few output channels."""
    gradient, weight = call.gradient, call.weight
    if gradient.numel() < MIN_ELEMENTS:
        return False
    if call.transposed:
        return call.groups == 1 and weight.size(1) <= _CHANNELS_OF_AN_IMAGE and gradient.is_contiguous()
    depthwise = call.groups == weight.size(0) > 1 and weight.size(1) == 1
    return depthwise and (max(call.stride) > 1 or (weight.dim() == 5 and not gradient.is_contiguous()))


def _weight_is_faster_in_fp32(call: Arguments) -> bool:
    """Whether the weight gradient is: for large depthwise kernels, and for many groups over large images."""
    gradient, weight = call.gradient, call.weight
    if call.groups == 1 or gradient.numel() < MIN_ELEMENTS:
        return False
    if weight.size(1) > 1:
        return weight.size(1) <= _CHANNELS_OF_A_GROUP and gradient.numel() >= _ELEMENTS_OF_GROUPS
    return math.prod(weight.shape[2:]) >= (_POSITIONS_IN_NCHW if gradient.is_contiguous() else _POSITIONS)


def _blocks_are_faster(call: Arguments) -> bool:
    """Whether the weight gradient is faster in blocks."""
    images = call.inputs.size(0)
    if pixels_of(call) * call.weight.numel() < MIN_MULTIPLICATIONS or (images % 2 and images < _ODD_IMAGES):
        return False
    if min(call.weight.shape[:2]) < weight_gradient.FEWEST:
        return False
    return _blocks_support(call)


def _blocks_support(call: Arguments) -> bool:
    is_plain = call.groups == 1 and call.weight.dim() == weight_gradient.DIMENSIONS
    return is_plain and weight_gradient.supports(*for_blocks(call))


def for_blocks(call: Arguments) -> tuple[Tensor, Tensor, Geometry]:
    """Return the arguments of `weight_gradient`; a transposed convolution exchanges input and gradient."""
    gradient, inputs = call[:2]
    return (inputs, gradient, call.kernel) if call.transposed else (gradient, inputs, call.kernel)
