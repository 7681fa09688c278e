"""Chooses by measurement which layers of a set-up model compute in fp32, and which under autocast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nano_loop.autotune.decisions import Decision, Decisions, measure_or_guess
from nano_loop.autotune.hooks import none_for_saved_tensors
from nano_loop.autotune.sizes import MOST_ELEMENTS, bucket, layout
from nano_loop.autotune.tuner import Algorithm, Race, Tuner
from nano_loop.kernels.norm.norms import computes_group_norm
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.torch_private import direct_parameters, in_mode, with_parameters
from nano_loop.precision.policy.layers_in_fp32 import RULES, UnlessListed, computes_as_ours, in_fp32

_FP32, _BF16 = "fp32", "bf16"
_PLAIN = (Tensor, nn.Parameter)

#: Maximum number of multiplications for each element that is read and written. Above it, bf16 is faster on every CPU
#: that has bf16 instructions, and fp32 may take 16 times as long, which is long even to measure.
_MOST_WORK = 256

#: The attributes of a layer that its time depends on. The rules decide about recurrences, whose states are arguments.
_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_ATTRIBUTES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONVOLUTION),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), (*_CONVOLUTION, "output_padding")),
    nn.GroupNorm: ("num_groups", "num_channels"),
}


class TunedLayers:
    """The choice of a dtype around the calls of layers; `layers_in_fp32` beside it has the first guess.

    Parameters
    ----------
    tuner : Tuner
        Measures.
    listed : iterable of str
        The operators whose dtypes were asked for; see `UnlessListed`.
    """

    def __init__(self, tuner: Tuner, listed: Iterable[str] = ()) -> None:
        self._tuner = tuner
        self._untuned = UnlessListed(listed)
        # By the id of a layer, which the decisions keep alive: two models may have it in common.
        self._decisions: dict[int, _OfLayer] = {}

    def around(self, layer: nn.Module) -> Call | None:
        """Return a function around calls of a layer, or None for modules that are called as they are."""
        untuned = self._untuned(layer)
        if type(layer) not in _ATTRIBUTES or self._untuned.is_listed(layer):
            return untuned
        decisions = self._decisions.setdefault(id(layer), _OfLayer(self._tuner, layer))

        def call(function: Call, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 1 or type(args[0]) not in _PLAIN or not decisions.is_fp32(args[0]):
                return function(self, *args, **kwargs)
            return in_fp32(function, self, args)

        return call


class _OfLayer:
    """Which calls of one layer compute in fp32.

    A decision is the same with and without gradients: a reentrant activation checkpoint computes without them first.
    """

    def __init__(self, tuner: Tuner, layer: nn.Module) -> None:
        self._tuner = tuner
        self._layer = layer
        self._parameters = direct_parameters(layer)
        self._guess: Callable[[Any, Tensor], bool] = RULES[type(layer)]
        self._by_kind = Decisions(tuner)

    def is_fp32(self, x: Tensor) -> bool:
        """Whether the call with input `x` computes in fp32."""
        weight = self._parameters.get("weight")
        try:
            key = x.shape, x.stride(), x.dtype, self._layer.training, weight is not None and weight.requires_grad
        except RuntimeError:  # a nested or a sparse tensor
            return False
        algorithm = self._by_kind.algorithm(
            key, lambda: self._guessed(x), lambda: self._decision(x), lambda: self._stored(x)
        )
        return algorithm == _FP32

    def _guessed(self, x: Tensor) -> str:
        return _FP32 if self._guess(self._layer, x) else _BF16

    def _stored(self, x: Tensor) -> str | None:
        measured = computes_as_ours(self._layer, (x,)) and _is_measured(self._layer, x)
        choice = self._tuner.choices.get(_key(self._layer, x)) if measured else None
        return None if choice is None else choice.algorithm

    def _decision(self, x: Tensor) -> Decision:
        guess, layer = self._guessed(x), self._layer
        if not computes_as_ours(layer, (x,)) or in_mode():
            return Decision(guess, is_settled=False)
        if not _is_measured(layer, x):
            return Decision(guess)
        return measure_or_guess(guess, lambda: self._tuner.choose(_key(layer, x), guess, lambda: _race(layer, x)))


def _is_measured(layer: nn.Module, x: Tensor) -> bool:
    """Whether a call has two algorithms, and neither takes long to measure."""
    # Autocast leaves one of fp32 as it is, and `fast_norm` has its own kernel.
    is_alone = isinstance(layer, nn.GroupNorm) and (x.dtype is torch.float32 or computes_group_norm(x))
    return not is_alone and 0 < _largest(layer, x) <= MOST_ELEMENTS and _work(layer, x) <= _MOST_WORK


def _outputs(layer: Any, x: Tensor) -> int:
    """Return about how many elements the output of a call has."""
    if isinstance(layer, nn.GroupNorm):
        return x.numel()
    if isinstance(layer, nn.Linear):
        return int(x.numel() // layer.in_features * layer.out_features)
    steps = math.prod(layer.stride)
    pixels = x.numel() // layer.in_channels
    return int((pixels * steps if layer.transposed else pixels // steps) * layer.out_channels)


def _largest(layer: nn.Module, x: Tensor) -> int:
    """Return the number of elements of the input, the output or the weight, or 0 where there is nothing to compute."""
    return (
        max(x.numel(), _outputs(layer, x), *(parameter.numel() for parameter in layer.parameters()), 0)
        if x.numel()
        else 0
    )


def _work(layer: Any, x: Tensor) -> float:
    """Return about how many multiplications a call takes for each element that it reads and writes."""
    if isinstance(layer, nn.GroupNorm):
        return 1.0
    weights: int = layer.weight.numel()
    outputs = _outputs(layer, x)
    inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    times = x.numel() // inputs if isinstance(layer, nn.Linear) or layer.transposed else outputs // layer.out_channels
    return float(times * weights / (x.numel() + outputs + weights))


def _key(layer: nn.Module, x: Tensor) -> str:
    kind = type(layer)
    values = [str(getattr(layer, name)) for name in _ATTRIBUTES[kind]]
    if kind is nn.Linear:  # its rows are all alike, however they are arranged
        sizes = [bucket(x.numel() // max(x.size(-1), 1))]
    else:
        sizes = [bucket(x.size(0)), *map(str, x.shape[1:])]
    weights = [layout(parameter) + ("g" if parameter.requires_grad else "") for parameter in layer.parameters()]
    of_input = f"{str(x.dtype).removeprefix('torch.')} {layout(x)}"
    return " ".join([kind.__name__, *values, "of", *sizes, of_input, *weights, "train" if layer.training else "eval"])


def _race(layer: nn.Module, x: Tensor) -> Race:
    by_name = {_BF16: _algorithm(layer, x, type(layer).forward), _FP32: _algorithm(layer, x, _forward_in_fp32)}
    return Race(by_name, _BF16, by_name[_FP32])


def _forward_in_fp32(layer: nn.Module, x: Tensor) -> Any:
    return in_fp32(type(layer).forward, layer, (x,))


def _algorithm(layer: nn.Module, x: Tensor, forward: Call) -> Algorithm:
    """Return what computes a call on tensors that share the memory of the real ones, in training with its backward."""
    twin, leaves = _twin(layer, x)
    gradient: list[Tensor] = []

    def algorithm() -> Sequence[Tensor]:
        # As in the loop: a weight is cast in each call, and the backward runs outside of autocast.
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with none_for_saved_tensors(), autocast, torch.set_grad_enabled(layer.training):
            out = forward(twin, leaves[0])
            if not layer.training:
                return [out]
            if not gradient:
                gradient.append(_some_like(out))
            with torch.autocast("cpu", enabled=False):
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                return [out.detach(), *torch.autograd.grad(out, wanted, gradient[0])]

    return algorithm


def _some_like(out: Tensor) -> Tensor:
    """Return a gradient of an output. Not ones: of these the gradient of a norm's input is all rounding."""
    values = torch.linspace(-1, 1, out.numel()).sin_().view(out.shape).to(out.dtype)
    return torch.empty_like(out).copy_(values)


def _twin(layer: nn.Module, x: Tensor) -> tuple[nn.Module, list[Tensor]]:
    """Return a layer like this one, without hooks, and the tensors that it computes from: new leaves of autograd."""
    parameters = {
        name: None if parameter is None else nn.Parameter(parameter.detach(), parameter.requires_grad)
        for name, parameter in direct_parameters(layer).items()
    }
    weights_are_trained = any(parameter is not None and parameter.requires_grad for parameter in parameters.values())
    # A call without gradients may be the first one of an activation checkpoint, and then they come later.
    leaves = [x.detach().requires_grad_(x.requires_grad or not (torch.is_grad_enabled() and weights_are_trained))]
    return with_parameters(layer, parameters), leaves + [
        parameter for parameter in parameters.values() if parameter is not None
    ]
