"""Batch and group norms with the activation behind them, and with a sum before a ReLU, in the passes of the norm.

The graph has torch's node of the norm, one for the sum, and one for the activation. The backward of the last gives the
norm's inputs their gradients, and nothing to the nodes between. So gradients of other uses of a norm's output add up as
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
    "norm_output": (_DENSE, *(FP32,) * 4, _DENSE, _DENSE),
    "norm_activation_backward": (_DENSE, _DENSE, *(FP32,) * 4, *(_DENSE,) * 3, FP32, FP32),
}
_NONE, _RELU, _SILU, _HARDSWISH = range(4)
_Gradients = tuple[Tensor | None, ...]


class Activation(ctypes.Structure):
    """SiLU, hardswish, or a ReLU: what is 0 or less, times a slope that is not negative; the rest at most a ceiling."""

    _fields_ = [("slope", ctypes.c_double), ("ceiling", ctypes.c_double), ("kind", ctypes.c_int64)]

    slope: float
    ceiling: float
    kind: int

    @classmethod
    def relu(cls, slope: float = 0.0, ceiling: float = math.nan) -> Activation:
        """Return a ReLU, ReLU6 or leaky ReLU. A ceiling that is NaN is none."""
        return cls(slope, ceiling, _RELU)

    @property
    def is_relu(self) -> bool:
        """Whether it is a ReLU, whose derivative follows from its output."""
        return self.kind == _RELU

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it, as torch does."""
        return x if self.kind == _NONE else self._function(x)

    def gradient(self, gradient: Tensor, of: Tensor) -> Tensor:
        """Return the gradient of its input, from the input, or of a ReLU from the output. It can be differentiated."""
        aten = torch.ops.aten
        if self.kind == _SILU and torch.is_grad_enabled():  # of torch's operator, there is no derivative
            rising = of.sigmoid()
            of_input: Tensor = gradient * (rising * (1 + of * (1 - rising)))
        elif self.kind == _SILU:
            of_input = aten.silu_backward(gradient, of)
        elif self.kind == _HARDSWISH:
            of_input = aten.hardswish_backward(gradient, of)
        elif self.slope:
            of_input = aten.leaky_relu_backward(gradient, of, self.slope, True)
        elif self._has_ceiling:
            of_input = aten.hardtanh_backward(gradient, of, 0.0, self.ceiling)
        else:
            of_input = aten.threshold_backward(gradient, of, 0)
        return of_input

    @property
    def _has_ceiling(self) -> bool:
        return not math.isnan(self.ceiling)

    def _function(self, x: Tensor) -> Tensor:
        if self.kind != _RELU:
            return F.silu(x) if self.kind == _SILU else F.hardswish(x)
        if self.slope:
            return F.leaky_relu(x, self.slope)
        return x.clamp(0, self.ceiling if self._has_ceiling else None)


#: Leaves what it is applied to as it is.
IDENTITY = Activation(0.0, math.nan, _NONE)
SILU, HARDSWISH = Activation(0.0, math.nan, _SILU), Activation(0.0, math.nan, _HARDSWISH)


class NormKind(NamedTuple):
    """What is computed of a norm's tensors.

    Attributes
    ----------
    kernel : CompiledKernel
        ``norms.c``.
    shape : ctypes.Structure
        How it reads the tensors.
    groups : int
        Of the channels of an image. 0: it is a batch norm.
    eps : float
        What is added to variances.
    """

    kernel: CompiledKernel
    shape: ctypes.Structure
    groups: int
    eps: float

    def computed_again(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the norm's output by torch, which can be differentiated."""
        if self.groups:
            return F.group_norm(x, self.groups, weight, bias, self.eps)
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=self.eps)


class Normalized(NamedTuple):
    """What a norm has computed its output from, or will.

    Attributes
    ----------
    kind : NormKind
        What is computed.
    x : torch.Tensor
        The input, of shape (N, C, *), in fp32 or bf16.
    weight, bias : torch.Tensor or None
        Of the channels, in fp32.
    means, inverses : torch.Tensor
        The statistics of the batch, or of each image's groups, likewise.
    added : torch.Tensor or None
        What is added to the output.
    """

    kind: NormKind
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    means: Tensor
    inverses: Tensor
    added: Tensor | None = None

    def write(self, out: Tensor, activation: Activation = IDENTITY) -> None:
        """Write the output, with what is added to it, through an activation: through a ReLU if something is added."""
        kernel, shape, groups, _ = self.kind
        arguments = (self.x, self.weight, self.bias, self.means, self.inverses)
        with torch.no_grad():
            if attempt(kernel, "norm_output", shape, groups, activation, *arguments, self.added, out):
                return
            kernel("norm_output", shape, groups, IDENTITY, *arguments, None, out)
            out.copy_(activation(out if self.added is None else out + self.added))

    def versions(self) -> list[int]:
        """Return the version counters of what the output is computed from."""
        tensors = (self.x, self.weight, self.bias, self.added)
        return [version(tensor) for tensor in tensors if tensor is not None]

    def refuse_changes(self, versions: list[int]) -> None:
        """Raise a NanoError if the versions are others now."""
        if self.versions() != versions:
            got = "an input of a norm was changed in place before its output was used"
            expected = "gradients of a norm are computed from its input"
            raise NanoError(error_message(got, expected, "Use the output first, or pass fast_norm=False"))


class Bypassed:
    """The outputs of norms and sums that an activation has read, and whether somebody may want their gradients."""

    def __init__(self) -> None:
        self._outputs: list[weakref.ref[Tensor]] = []
        #: Whether anything but the activation has read them.
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


class NormActivation(torch.autograd.Function):
    """The activation of a norm's output, or the ReLU of the sum of that and another tensor.

    Takes an `Activation`, a `Bypassed`, whether the output, which is not read, becomes the result, that output, and the
    parts of a `Normalized`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        activation: Activation,
        bypassed: Bypassed,
        in_place: bool,
        pending: Tensor,
        kind: NormKind,
        *tensors: Any,
    ) -> Tensor:
        """See `torch.autograd.Function`."""
        result = pending if in_place else torch.empty_like(pending)
        Normalized(kind, *tensors).write(result, activation)
        if in_place:
            ctx.mark_dirty(result)
        ctx.activation, ctx.bypassed, ctx.kind = activation, bypassed, kind
        *saved, added = tensors
        ctx.save_for_backward(*saved, result if activation.is_relu else None)
        ctx.has_sum = added is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """See `torch.autograd.Function`."""
        *saved, result = ctx.saved_tensors
        of_x, of_weight, of_bias, _, _, of_added = ctx.needs_input_grad[5:]
        gradients = None
        if not (ctx.bypassed.have_gradients() or torch.is_grad_enabled() or is_batched(gradient)):
            gradients = attempt(_gradients, ctx, gradient, saved, result, (of_x, of_weight, of_bias))
        if gradients is None:  # by the nodes between
            of = ctx.kind.computed_again(*saved[:3]) if result is None else result
            return *[None] * 3, ctx.activation.gradient(gradient, of), *[None] * 7
        *of_norm, of_sum = gradients
        return *[None] * 5, *of_norm, None, None, of_sum if of_added else None


def _gradients(
    ctx: Any, gradient: Tensor, saved: list[Tensor], result: Tensor | None, wanted: tuple[bool, ...]
) -> _Gradients | None:
    """Return the gradients of the norm's input, weight and bias, and of what was added, or None: there is no memory."""
    x, weight, bias, means, inverses = saved
    if gradient.dtype is not x.dtype or gradient.layout is not torch.strided:
        return None
    of_sum = torch.empty_like(x) if ctx.has_sum else None
    of_x = torch.empty_like(x) if wanted[0] else None
    of_weight, of_bias = (empty(x.size(1)) if is_wanted else None for is_wanted in wanted[1:])
    tensors = (lying_as(gradient, x), x, weight, means, inverses, bias, result if ctx.has_sum else None)
    results = of_sum, of_x, of_weight, of_bias
    kernel, shape, groups, _ = ctx.kind
    if not kernel("norm_activation_backward", shape, groups, ctx.activation, *tensors, *results):
        return None
    return of_x, of_weight, of_bias, of_sum
