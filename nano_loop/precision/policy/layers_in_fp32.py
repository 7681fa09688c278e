"""Calls of layers that are faster in fp32 than under bf16 autocast: they compute in fp32 inside set-up models.

bf16 costs casts of the input, of the weights and of their gradients, and oneDNN has no fast bf16 kernel for some
shapes. The bounds are those of `python -m benchmarks.shapes`; docs/performance.md has its results. Outputs keep
autocast's dtype, so all that follows is as without this file, only less rounded.

The calls of modules are intercepted, not the kernels of autocast: a Python kernel would hold the interpreter's lock
while it waits for the lock of autocast's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nano_loop.config.op_names import operators_of
from nano_loop.kernels.norm.norms import computes_group_norm
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.calls.exports import is_exporting
from nano_loop.patching.torch_private import INNER_CONVOLUTION, calls_only_forward, direct_parameters, in_functorch
from nano_loop.precision.autocast.autocast import to_fp32, weights_cast_once

#: Minimum number of multiplications. Below it, the overhead in Python exceeds the gain.
WORTH_IT = 1 << 20
#: The same for the weights of a product with few rows, and of a recurrence.
WEIGHTS_WORTH_IT = 1 << 13
#: Maximum number of rows of a product, and of pixels of a convolution, for which casting the weights costs more than a
#: bf16 product gains.
FEW_ROWS = 32
#: Maximum number of multiplications of one step of a recurrence for which the calls of its casts cost more.
FEW_MULTIPLICATIONS = 3 << 20
#: Maximum number of output features for which casting an fp32 input costs more than a bf16 product gains.
FEW_OUTPUTS = 16
#: Maximum number of input channels, and of kernel positions, for which oneDNN's bf16 convolutions with a stride and a
#: bias are slow in NCHW. Others of few channels were as fast or faster in bf16.
FEW_CHANNELS, FEW_POSITIONS = 3, 16
#: Maximum number of output channels for which its 1×1 convolutions are slow in NCHW.
FEW_OUTPUTS_OF_1X1 = 8

#: Maximum number of channels of a group for which torch's group norm of bf16 is slow in NHWC, in its backward.
FEW_CHANNELS_OF_A_GROUP = 15

_CAST = (torch.float32, torch.bfloat16)
_PLAIN = (Tensor, nn.Parameter)


def linear_is_faster(layer: Any, x: Tensor) -> bool:
    """Whether a linear layer is faster in fp32."""
    elements, inputs, outputs = x.numel(), layer.in_features, layer.out_features
    if elements < (FEW_ROWS + 1) * inputs:
        return bool(inputs * outputs >= WEIGHTS_WORTH_IT)
    if outputs > FEW_OUTPUTS:
        return False
    return bool(x.dtype is torch.float32 and not x.requires_grad and elements * outputs >= WORTH_IT)


def convolution_is_faster(layer: Any, x: Tensor) -> bool:
    """Whether a convolution is faster in fp32."""
    positions, channels = math.prod(layer.kernel_size), layer.in_channels // layer.groups
    if not _is_batch(layer, x):
        return False
    weights = layer.out_channels * channels * positions
    pixels = x.size(0) * math.prod(_output_size(layer, x))
    if pixels <= FEW_ROWS or math.prod(x.shape[2:]) == 1:
        return bool(weights >= WEIGHTS_WORTH_IT)
    if layer.groups > 1 or pixels * weights < WORTH_IT or x.stride(1) == 1:  # a stride of 1: NHWC
        return False
    if positions == 1:
        return bool(layer.out_channels <= FEW_OUTPUTS_OF_1X1)
    if layer.weight.stride(1) == 1:  # NHWC, to which the input will be converted
        return False
    with_stride = x.dim() == 4 and min(layer.stride) > 1 and layer.bias is not None
    return bool(with_stride and channels <= FEW_CHANNELS and positions <= FEW_POSITIONS)


def transposed_convolution_is_faster(layer: Any, x: Tensor) -> bool:
    """Whether a transposed convolution is faster in fp32: of single pixels, or depthwise."""
    if not _is_batch(layer, x):
        return False
    weights = layer.out_channels // layer.groups * math.prod(layer.kernel_size)  # of an input channel
    if math.prod(x.shape[2:]) == 1:
        return bool(layer.in_channels * weights >= WEIGHTS_WORTH_IT)
    return bool(layer.groups == layer.in_channels > 1 and x.numel() * weights >= WORTH_IT)


def recurrence_is_faster(layer: Any, x: Tensor) -> bool:
    """Whether a GRU or a plain RNN, whose products are those of one time step, is faster in fp32."""
    gates = 3 if isinstance(layer, nn.GRU) else 1
    weights = gates * layer.hidden_size * layer.hidden_size
    rows = x.size(0 if layer.batch_first else 1)
    return x.dim() == 3 and weights >= WEIGHTS_WORTH_IT and rows * weights <= FEW_MULTIPLICATIONS


def group_norm_is_faster(layer: Any, x: Tensor) -> bool:
    """Whether a group norm is faster in fp32 than by torch's kernel: `fast_norm` has none that is slow.

    With an fp32 input it computes in fp32 under autocast too.
    """
    if computes_group_norm(x):
        return False
    is_nhwc = x.dim() in (4, 5) and x.stride(1) == 1 and math.prod(x.shape[2:]) > 1
    few = layer.num_channels <= FEW_CHANNELS_OF_A_GROUP * layer.num_groups
    return bool(is_nhwc and few and x.dtype is torch.bfloat16)


def _is_batch(layer: Any, x: Tensor) -> bool:
    """Whether the input has a batch dimension, and the padding is of zeros and in numbers."""
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return plain and x.dim() == len(layer.kernel_size) + 2


def _output_size(layer: Any, x: Tensor) -> list[int]:
    """Return the number of output pixels by dimension."""
    sizes = zip(x.shape[2:], layer.padding, layer.dilation, layer.kernel_size, layer.stride, strict=True)
    return [max((size + 2 * edge - gap * (width - 1) - 1) // step + 1, 0) for size, edge, gap, width, step in sizes]


#: Whether a call with an input is faster in fp32, by the class of the layer.
RULES: dict[type[nn.Module], Callable[[Any, Tensor], bool]] = {
    nn.Linear: linear_is_faster,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution_is_faster),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), transposed_convolution_is_faster),
    **dict.fromkeys((nn.GRU, nn.RNN), recurrence_is_faster),
    nn.GroupNorm: group_norm_is_faster,
}


#: The operators that these layers call.
_OPERATORS = {
    nn.Linear: ("linear",),
    **{kind: ("convolution", INNER_CONVOLUTION, kind.__name__.lower()) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{
        getattr(nn, f"ConvTranspose{count}d"): ("convolution", INNER_CONVOLUTION, f"conv_transpose{count}d")
        for count in (1, 2, 3)
    },
    nn.GRU: ("gru",),
    nn.RNN: ("rnn_tanh", "rnn_relu"),
    nn.GroupNorm: ("group_norm", "native_group_norm"),
}


class UnlessListed:
    """`in_fp32_where_faster` for a run in which the dtypes of some operators were asked for.

    Parameters
    ----------
    names : iterable of str
        The operators' names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._listed = {operator.partition(".")[0] for name in names for operator in operators_of(name)}

    def is_listed(self, layer: nn.Module) -> bool:
        """Whether a layer calls one of these operators."""
        return not self._listed.isdisjoint(_OPERATORS.get(type(layer), ()))

    def __call__(self, layer: nn.Module) -> Call | None:
        """Return the function around calls of a layer, or None."""
        return None if self.is_listed(layer) else in_fp32_where_faster(layer)


def in_fp32_where_faster(layer: nn.Module) -> Call | None:
    """Return a function around calls of a layer, which computes in fp32 what is faster so, or None for other modules.

    Subclasses are other modules: they may compute anything.
    """
    rule = RULES.get(type(layer))
    if type(layer) is nn.Linear:
        return _around_linear(layer)
    if rule is recurrence_is_faster or type(layer) is nn.LSTM:  # which is composed of products for packed sequences
        return _around_recurrence
    return None if rule is None else _around(rule)


def _around_linear(layer: nn.Linear) -> Call | None:
    """As `_around`, with `linear_is_faster` taken apart: models have many linear layers, whose calls are short."""
    inputs, outputs = layer.in_features, layer.out_features
    few = (FEW_ROWS + 1) * inputs if inputs * outputs >= WEIGHTS_WORTH_IT else 0  # elements of an input of few rows
    if outputs <= FEW_OUTPUTS:
        return _around(linear_is_faster)
    if not few:
        return None

    def call(function: Call, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or type(args[0]) not in _PLAIN or args[0].numel() >= few:
            return function(self, *args, **kwargs)
        return in_fp32(function, self, args)

    return call


def _around(rule: Callable[[Any, Tensor], bool]) -> Call:
    def call(function: Call, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # One condition, since most calls go on as they are, and this is run for each of them.
        if kwargs or len(args) != 1 or type(args[0]) not in _PLAIN or not rule(self, args[0]):
            return function(self, *args, **kwargs)
        return in_fp32(function, self, args)

    return call


def _around_recurrence(function: Call, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """As `_around`. Without hooks of the user, nothing can change a weight between two time steps."""
    most = 2  # the input and the state
    is_plain = type(self) in RULES and not kwargs and 0 < len(args) <= most and type(args[0]) in _PLAIN
    if is_plain and recurrence_is_faster(self, args[0]):
        return in_fp32(function, self, args)
    with weights_cast_once() if calls_only_forward(self) else nullcontext():
        return function(self, *args, **kwargs)


def in_fp32(function: Call, layer: nn.Module, args: tuple[Any, ...]) -> Any:
    """Call a layer in fp32, if all that it computes with would be cast, and cast its output as autocast does."""
    if not computes_as_ours(layer, args):
        return function(layer, *args)
    torch.set_autocast_enabled("cpu", False)
    try:
        outputs = function(layer, *[arg if arg is None else to_fp32(arg) for arg in args])
    finally:
        torch.set_autocast_enabled("cpu", True)
    dtype = torch.bfloat16
    if type(layer) is nn.GRU:  # whose last cast is to the dtype of its state, which it makes in that of the input
        dtype = next(arg.dtype for arg in reversed(args) if arg is not None)
    return tuple(output.to(dtype) for output in outputs) if isinstance(outputs, tuple) else outputs.to(dtype)


def computes_as_ours(layer: nn.Module, args: Sequence[Any]) -> bool:
    """Whether a call of a layer may compute in fp32: autocast to bf16 would cast all that it computes with."""
    return _is_cast(args[0]) and _is_ours(layer, args[1:])


def _is_cast(value: Any) -> bool:
    """Whether a value is a plain tensor which autocast casts to bf16."""
    return type(value) in _PLAIN and value.dtype in _CAST and value.layout is torch.strided and value.is_cpu


def _is_ours(layer: nn.Module, states: Sequence[Any]) -> bool:
    """Whether autocast to bf16 is on and would cast all that this layer computes with."""
    if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is not torch.bfloat16:
        return False
    # A parametrization changes the class, and to read a weight computes it.
    if type(layer) not in RULES or not calls_only_forward(layer) or in_functorch() or is_exporting():
        return False
    weights_are_fp32 = all(parameter is None or _is_fp32(parameter) for parameter in direct_parameters(layer).values())
    return weights_are_fp32 and all(state is None or _is_cast(state) for state in states)


def _is_fp32(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.is_cpu and weight.layout is torch.strided
