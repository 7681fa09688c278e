"""Batch norms with a following ReLU, ReLU6 or leaky ReLU, and with a sum between them, in the passes of the norm.

The graph has torch's node of the norm, one for the sum, and one for the ReLU. The backward of the last gives the norm's
inputs their gradients, and nothing to the nodes between. So gradients of other uses of a norm's output add up as
always. Where somebody may see the gradient of that output, by a hook or as an input of `torch.autograd.grad`, and where
derivatives of derivatives are recorded, each node computes its own, as torch's do.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_loop.errors import NanoError, error_message
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import DENSE, FLOATS, FP32, attempt, empty
from nano_loop.kernels.norm.norm_arguments import lying_as
from nano_loop.patching.torch_private import is_batched, version

_DENSE = FLOATS._replace(layout=DENSE)
#: What the functions of ``norms.c`` take.
FUNCTIONS = {
    "batch_norm_output": (_DENSE, *(FP32,) * 4, _DENSE, _DENSE),
    "batch_norm_relu_backward": (_DENSE, _DENSE, *(FP32,) * 4, *(_DENSE,) * 3, FP32, FP32),
}
_Gradients = tuple[Tensor | None, ...]


class Relu(ctypes.Structure):
    """What is 0 or less, times a slope that is not negative; the rest is at most a ceiling, or NaN: there is none."""

    _fields_ = [("slope", ctypes.c_double), ("ceiling", ctypes.c_double)]

    slope: float
    ceiling: float

    def has_ceiling(self) -> bool:
        """Whether there is a ceiling."""
        return not math.isnan(self.ceiling)

    def apply_to(self, out: Tensor) -> None:
        """Apply it in place."""
        if self.slope not in (0, 1):
            F.leaky_relu(out, self.slope, inplace=True)
        elif self.slope == 0:
            out.clamp_(0, self.ceiling if self.has_ceiling() else None)

    def gradient(self, gradient: Tensor, result: Tensor) -> Tensor:
        """Return the gradient of what it was applied to. It can be differentiated."""
        if self.slope:
            of_input: Tensor = torch.ops.aten.leaky_relu_backward(gradient, result, self.slope, True)
        elif self.has_ceiling():
            of_input = torch.ops.aten.hardtanh_backward(gradient, result, 0.0, self.ceiling)
        else:
            of_input = torch.ops.aten.threshold_backward(gradient, result, 0)
        return of_input


#: Leaves what it is applied to as it is.
IDENTITY = Relu(1.0, math.nan)


class Normalized(NamedTuple):
    """What a batch norm has computed its output from, or will.

    Attributes
    ----------
    kernel : CompiledKernel
        ``norms.c``.
    shape : ctypes.Structure
        How it reads the tensors.
    x : torch.Tensor
        The input, of shape (N, C, *), in fp32 or bf16.
    weight, bias : torch.Tensor or None
        Of the channels, in fp32.
    means, inverses : torch.Tensor
        The statistics of the batch, likewise.
    added : torch.Tensor or None
        What is added to the output.
    """

    kernel: CompiledKernel
    shape: ctypes.Structure
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    means: Tensor
    inverses: Tensor
    added: Tensor | None = None

    def write(self, out: Tensor, relu: Relu = IDENTITY) -> None:
        """Write the output, with what is added to it, through a ReLU."""
        arguments = (self.x, self.weight, self.bias, self.means, self.inverses)
        with torch.no_grad():
            if attempt(self.kernel, "batch_norm_output", self.shape, relu, *arguments, self.added, out):
                return
            self.kernel("batch_norm_output", self.shape, IDENTITY, *arguments, None, out)
            if self.added is not None:
                torch.add(out, self.added, out=out)
            relu.apply_to(out)

    def versions(self) -> list[int]:
        """Return the version counters of what the output is computed from."""
        tensors = (self.x, self.weight, self.bias, self.added)
        return [version(tensor) for tensor in tensors if tensor is not None]

    def refuse_changes(self, versions: list[int]) -> None:
        """Raise a NanoError if the versions are others now."""
        if self.versions() != versions:
            got = "an input of a batch norm was changed in place before its output was used"
            expected = "gradients of a batch norm are computed from its input"
            raise NanoError(error_message(got, expected, "Use the output first, or pass fast_norm=False"))


class Bypassed:
    """The outputs of norms and sums that a ReLU has read, and whether somebody may want their gradients."""

    def __init__(self) -> None:
        self._outputs: list[weakref.ref[Tensor]] = []
        #: Whether anything but the ReLU has read them.
        self.is_used = False

    def add(self, output: Tensor) -> None:
        """Add an output, which is not kept alive."""
        self._outputs.append(weakref.ref(output))

    def have_gradients(self) -> bool:
        """Whether a hook or a call of autograd may ask for their gradients: nobody can once they are freed."""
        return self.is_used or any(output() is not None for output in self._outputs)


class Sum(torch.autograd.Function):
    """The node of a sum whose elements are written later: takes two tensors, and whether the first becomes the sum."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, added: Tensor, in_place: bool) -> Tensor:
        """See `torch.autograd.Function`."""
        ctx.set_materialize_grads(False)
        if not in_place:
            return torch.empty_like(out)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """See `torch.autograd.Function`."""
        return gradient, gradient, None


class NormRelu(torch.autograd.Function):
    """The ReLU of a batch norm's output, or of the sum of that and another tensor.

    Takes a `Relu`, a `Bypassed`, whether the output, which is not read, becomes the result, that output, and the parts
    of a `Normalized`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        relu: Relu,
        bypassed: Bypassed,
        in_place: bool,
        pending: Tensor,
        kernel: Any,
        shape: Any,
        *tensors: Any,
    ) -> Tensor:
        """See `torch.autograd.Function`."""
        result = pending if in_place else torch.empty_like(pending)
        normalized = Normalized(kernel, shape, *tensors)
        normalized.write(result, relu)
        if in_place:
            ctx.mark_dirty(result)
        ctx.relu, ctx.bypassed, ctx.kernel, ctx.shape = relu, bypassed, kernel, shape
        *saved, added = tensors
        ctx.save_for_backward(*saved, result)
        ctx.has_sum = added is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """See `torch.autograd.Function`."""
        *saved, result = ctx.saved_tensors
        of_x, of_weight, of_bias, _, _, of_added = ctx.needs_input_grad[6:]
        gradients = None
        if not (ctx.bypassed.have_gradients() or torch.is_grad_enabled() or is_batched(gradient)):
            gradients = attempt(_gradients, ctx, gradient, saved, result, (of_x, of_weight, of_bias))
        if gradients is None:  # by the nodes between
            return *[None] * 3, ctx.relu.gradient(gradient, result), *[None] * 8
        *of_norm, of_sum = gradients
        return *[None] * 6, *of_norm, None, None, of_sum if of_added else None


def _gradients(
    ctx: Any, gradient: Tensor, saved: list[Tensor], result: Tensor, wanted: tuple[bool, ...]
) -> _Gradients | None:
    """Return the gradients of the norm's input, weight and bias, and of what was added, or None: there is no memory."""
    x, weight, bias, means, inverses = saved
    if gradient.dtype is not x.dtype or gradient.layout is not torch.strided:
        return None
    of_sum = torch.empty_like(x) if ctx.has_sum else None
    of_x = torch.empty_like(x) if wanted[0] else None
    of_weight, of_bias = (empty(x.size(1)) if is_wanted else None for is_wanted in wanted[1:])
    tensors = (lying_as(gradient, x), x, weight, means, inverses, bias, result if ctx.has_sum else None)
    if not ctx.kernel("batch_norm_relu_backward", ctx.shape, ctx.relu, *tensors, of_sum, of_x, of_weight, of_bias):
        return None
    return of_x, of_weight, of_bias, of_sum
