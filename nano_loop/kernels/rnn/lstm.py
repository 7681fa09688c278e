"""Layers of LSTMs in bf16: ``aten::mkldnn_rnn_layer`` by `nano_loop.kernels.rnn.lstm_layer`, where that is faster.

Those of fp32 are computed by it where products are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.memory import attempt
from nano_loop.kernels.replacement import Choose, Replacement
from nano_loop.kernels.rnn import lstm_layer
from nano_loop.kernels.rnn.lstm_layer import GATES, Arguments, States
from nano_loop.kernels.rounding import LSTM, is_large, may_round, note
from nano_loop.patching.ownership import belongs_to_set_up_model, rule_for
from nano_loop.patching.torch_private import in_functorch

#: The name of the rule that chooses the algorithm of a call into a set-up model (see `Choose`), and the algorithms.
ALGORITHM = "algorithm of an LSTM"
TORCH, BLOCKS = "torch", "blocks"

#: Minimum number of multiplications. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 22
#: Minimum number of steps: the weights are packed once for all of them.
_FEWEST_STEPS = 4
#: Minimum number of units: those of a quarter of a tile.
_FEWEST_UNITS = 16
_DIMENSIONS = 3  # steps, batch, inputs
_LSTM = 2  # torch's mode

_Kernel = Callable[..., Any]


def for_set_up_models(original: _Kernel | None) -> _Kernel:
    """Return the replacement of the kernel of autograd on the CPU of ``aten::mkldnn_rnn_layer``.

    Calls that do not belong to a set-up model return torch's own result, bitwise identical. What a call of ours has
    kept for the backward is for no kernel of torch, also if the backward comes after the run.

    Parameters
    ----------
    original : callable
        The original kernel. None is not supported.
    """
    assert original is not None

    def dispatched(keys: torch.DispatchKeySet, *args: Any) -> Any:
        def by_torch(*arguments: Any) -> Any:
            tensors = Arguments(*arguments).tensors
            return original(keys, *tensors, *args[len(tensors) :])[:3]

        call = _ours(args)
        computed = None
        if call is not None and _algorithm(call, by_torch) == BLOCKS:
            computed = attempt(lstm_layer.lstm, call)
        if computed is None:
            return original(keys, *args)
        return *computed, None  # torch ignores the workspace, which is for its own kernel

    return dispatched


REPLACEMENTS = (Replacement("mkldnn_rnn_layer", for_set_up_models, "AutogradCPU"),)


def _ours(args: Sequence[Any]) -> Arguments | None:
    """Return the arguments of torch's operator, if this kernel supports them and the call is large enough."""
    tensors, (is_reversed, batch_sizes, mode, hidden, _, has_biases) = args[:7], args[7:13]
    inputs, input_weight, hidden_weight, *biases, output, cells = tensors
    dtype = inputs.dtype
    if mode != _LSTM or batch_sizes or dtype not in (torch.bfloat16, torch.float32):
        return None
    if any(tensor.dtype is not dtype for tensor in tensors):
        return None
    if inputs.dim() != _DIMENSIONS:
        return None
    steps, batch, size = inputs.shape
    if steps < _FEWEST_STEPS or hidden < _FEWEST_UNITS or hidden % 2:
        return None
    multiplications = steps * batch * GATES * hidden * (size + hidden)
    if dtype is torch.float32:
        if not may_round(LSTM, multiplications):
            return None
    elif multiplications < MIN_MULTIPLICATIONS or not belongs_to_set_up_model():
        return None
    # torch.func calls first with its own tensors, and then with those inside of them, which need no gradients.
    if in_functorch() or (torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors)):
        return None
    call = Arguments(
        inputs, input_weight, hidden_weight, tuple(biases) if has_biases else (), output, cells, is_reversed
    )
    return call if all(map(_is_plain, tensors)) and _is_one_layer(call) else None


def _is_one_layer(call: Arguments) -> bool:
    """Whether the shapes are those that torch calls its operator with, and not those of its decomposition."""
    (_, batch, size), hidden = call.inputs.shape, call.output.size(-1)
    gates = GATES * hidden
    return (
        call.output.shape == call.cells.shape == (batch, hidden)
        and call.input_weight.shape == (gates, size)
        and call.hidden_weight.shape == (gates, hidden)
        and all(bias.shape == (gates,) for bias in call.biases)
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no subclass, and its storage is not released."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.data_ptr() != 0


def _algorithm(call: Arguments, by_torch: _Kernel) -> str:
    rounds = call.inputs.dtype is torch.float32
    is_first_guess = lstm_layer.KERNEL.is_first_guess and (not rounds or is_large(LSTM, _multiplications(call)))
    rule: Choose | None = rule_for(ALGORITHM)
    algorithm = BLOCKS if is_first_guess else TORCH
    if rule is not None:
        algorithm = rule(call, lambda: {TORCH: by_torch, BLOCKS: _by_blocks}, algorithm)
    if rounds and algorithm == BLOCKS:
        note(LSTM, _multiplications(call))
    return algorithm


def _multiplications(call: Arguments) -> int:
    steps, batch, _ = call.inputs.shape
    return steps * batch * (call.input_weight.numel() + call.hidden_weight.numel())


def _by_blocks(*arguments: Any) -> States:
    return lstm_layer.lstm(Arguments(*arguments))
