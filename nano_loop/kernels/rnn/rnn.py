"""torch's operators of RNNs, GRUs and LSTMs, layer by layer by `nano_loop.kernels.rnn.recurrence`.

torch composes them of several operators per step, but for LSTMs of sequences of equal length, which are oneDNN's. Of
those the faster algorithm is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import denormals, override
from nano_loop.kernels.linear import product
from nano_loop.kernels.memory import computes_now, has_tangent, is_plain
from nano_loop.kernels.override import COMPILED, FP32, REFERENCE, ROUNDED, TORCH, Algorithm, Call, Override, choose
from nano_loop.kernels.rnn import recurrence
from nano_loop.kernels.rnn.operator_call import OperatorCall, are_shapes_right, offsets_of, offsets_of_equal
from nano_loop.kernels.rnn.recurrent_layer import GATES, GRU, LSTM, RELU, TANH, Recurrence
from nano_loop.patching.operators.operators import Kernel, overridden
from nano_loop.patching.ownership import NO_RULES, Rules, belongs_to_set_up_model, rules_now
from nano_loop.patching.torch_private import below_autocast, below_torch_functions
from nano_loop.policy import product_precision

#: Number of steps of an LSTM that are measured, or of multiplications if that is more steps: what a call takes besides
#: should not decide.
_TIMED_STEPS, _TIMED_MULTIPLICATIONS = 16, 1 << 26
#: Most units of an LSTM in fp32 that is not left to oneDNN, and of all sequences together. The weights of more units
#: do not fit into a core's cache, and with more sequences oneDNN's products of a step are as fast.
_MOST_UNITS, _MOST_OF_A_STEP = 256, 1 << 14
#: Minimum number of multiplications of an LSTM in bf16. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 22
#: Fewest steps that are computed in C, by the mode, with a backward and without one: torch takes as long for them as
#: Python takes for a call.
_FEWEST_STEPS = {RELU: (16, 24), TANH: (16, 24), LSTM: (8, 16), GRU: (8, 16)}
#: Fewest steps of an LSTM that is oneDNN's otherwise.
_FEWEST_BESIDE_ONEDNN = 4
#: Most multiplications of a step of one sequence without a backward: to pack more weights for it takes too long.
_MOST_OF_ONE = 1 << 16
_DTYPES = torch.float32, torch.bfloat16
#: Operators of which torch composes a step under autocast, and which a user may want in another dtype.
_COMPOSED = ("linear", "sigmoid", "sigmoid_", "tanh", "tanh_", "relu")


class _Details:
    """What a call is besides its tensors: the arguments, and what its layers have in common.

    Parameters
    ----------
    arguments : OperatorCall
        The arguments of torch's operator.
    layer : Recurrence, optional
        What the layers have in common, if that is known.
    """

    def __init__(self, arguments: OperatorCall, layer: Recurrence | None = None) -> None:
        self.arguments = arguments
        if layer is not None:
            self.layer = layer

    @functools.cached_property
    def layer(self) -> Recurrence | None:
        """The layer, or None where torch computes the call. The first who asks is inside the call."""
        return _layer(self.arguments, rules_now() or NO_RULES)


def _supports(mode: int, is_packed: bool, kernel: Kernel, inputs: Tensor, *args: Any) -> Call:
    batch_sizes, (states, weights, *numbers) = (args[0], args[1:]) if is_packed else (None, args)
    states = tuple(states) if mode == LSTM else (states,)
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (inputs, *weights))
    call = OperatorCall(mode, inputs, batch_sizes, states, tuple(weights), *numbers)._replace(is_trained=is_trained)
    tensors = inputs, *states, *weights
    return Call(
        "lstm",
        tensors,
        (call.batch_first, call.has_biases, call.bidirectional, call.num_layers, is_trained),
        kernel,
        call.multiplications,
        _Details(call),
        len(tensors) if is_trained else 0,
        rough=(0, 1),
        timed=_timed,
    )


def _computed(of: Call) -> tuple[Tensor, ...] | None:
    """Compute one of torch's operators, or return None where torch's kernel has to."""
    call, layer = of.details.arguments, of.details.layer
    if layer is None:
        return None
    if call.is_onednns:
        if layer.in_bf16 and not layer.rounds:
            return None
        algorithms = {TORCH: _by_torch, COMPILED: _by_layers}
        if layer.in_bf16:
            is_faster = product.KERNEL.is_first_guess and of.multiplications >= MIN_MULTIPLICATIONS
            algorithms[REFERENCE] = _by_torch_in_fp32
        else:
            is_faster = is_faster_than_onednn(call)
        raced = of._replace(numbers_in="bf16" if layer.in_bf16 else "fp32")
        if choose(rules_now() or NO_RULES, raced, lambda: algorithms, COMPILED if is_faster else TORCH) != COMPILED:
            return None
    with below_torch_functions():
        return _by_layers(of)


def _can_round(of: Call) -> bool:
    """Whether an LSTM in fp32 is computed in C from rounded factors."""
    layer = of.details.layer
    is_fp32 = layer is not None and not layer.in_bf16
    return is_fp32 and of.details.arguments.is_onednns and product.KERNEL.unavailable is None


def _rounded(of: Call) -> tuple[Tensor, ...]:
    details = _Details(of.details.arguments, of.details.layer._replace(in_bf16=True))
    with below_torch_functions():
        return _by_layers(of._replace(details=details))


def _arguments(of: Call) -> OperatorCall:
    call, (inputs, *others) = of.details.arguments, of.tensors
    count = len(call.states)
    arguments: OperatorCall = call._replace(inputs=inputs, states=(*others[:count],), weights=(*others[count:],))
    return arguments


def _timed(of: Call) -> Call | None:
    """Return some steps of a call, without the dropout, which draws from the generator."""
    call, layer = _arguments(of), of.details.layer
    time = 1 if call.batch_first else 0
    steps = max(_TIMED_STEPS, _TIMED_MULTIPLICATIONS * call.inputs.size(time) // of.multiplications)
    call = call._replace(inputs=call.inputs.narrow(time, 0, min(steps, call.inputs.size(time))), dropout=0.0)
    details = _Details(call, layer._replace(offsets=offsets_of_equal(call)))
    of = of._replace(tensors=(call.inputs, *of.tensors[1:]), details=details)
    return of if GATES[LSTM] * max(tensor.numel() for tensor in of.tensors) <= override.MOST_ELEMENTS else None


def _by_torch(of: Call) -> Any:
    assert of.kernel is not None
    return of.kernel(*_arguments(of).of_torch)


def _by_torch_in_fp32(of: Call) -> Any:
    with below_autocast():
        return _by_torch(of)


def denormals_flushed() -> AbstractContextManager[None]:
    """Return a context in which oneDNN's backward of set-up models' LSTMs flushes denormals, as that in C does."""
    return overridden("mkldnn_rnn_layer_backward", _without_denormals, "CPU")


def _without_denormals(original: Kernel | None) -> Callable[..., Any]:
    """Return oneDNN's backward of an LSTM, in which gradients that vanish become 0."""
    assert original is not None

    def backward(*args: Any) -> Any:
        threads = denormals.count_of_threads() if belongs_to_set_up_model() else 0
        try:
            denormals.flush(threads)
            return original(*args)
        finally:
            denormals.restore(threads)

    return backward


_ROUNDED = Algorithm(ROUNDED, _rounded, FP32, is_exact=False, supports=_can_round, kernel=recurrence.KERNEL.name)
#: Calls that do not belong to a set-up model return torch's own result, bitwise identical.
OVERRIDES = tuple(
    Override(
        f"{name}.{overload}",
        (
            *([_ROUNDED] if mode == LSTM and overload == "input" else []),
            Algorithm(COMPILED, _computed, _DTYPES, kernel=recurrence.KERNEL.name, is_raced=False),
        ),
        functools.partial(_supports, mode, overload == "data"),
        by_torch=_by_torch,
        dispatch_key="AutogradCPU",
        product=product_precision.LSTM if mode == LSTM and overload == "input" else "",
    )
    for name, mode in (("rnn_relu", RELU), ("rnn_tanh", TANH), ("gru", GRU), ("lstm", LSTM))
    for overload in ("input", "data")
)


def _by_layers(of: Call) -> tuple[Tensor, ...]:
    call, layer = _arguments(of), of.details.layer
    outputs = call.inputs.transpose(0, 1) if call.batch_first else call.inputs
    shape, directions = outputs.shape[:-1], 1 + call.bidirectional
    layers, states = call.layers, []
    for first in range(0, len(layers), directions):
        rows = outputs.reshape(-1, outputs.size(-1))
        results = [
            recurrence.recurrence(layer._replace(is_reversed=bool(at)), arguments._replace(inputs=rows))
            for at, arguments in enumerate(layers[first : first + directions])
        ]
        states += [state for _, *state in results]
        parts = [result[0].view(*shape, result[0].size(-1)) for result in results]
        outputs = parts[0] if directions == 1 else torch.cat(parts, -1)
        if call.train and call.dropout and first + directions < len(layers):
            outputs = torch.ops.aten.dropout(outputs, call.dropout, True)
    if directions == 1 and outputs.requires_grad:
        outputs = outputs.clone()  # the backward reads what the user may overwrite
    outputs = outputs.transpose_(0, 1) if call.batch_first else outputs  # no view, as torch's
    return outputs, *map(torch.ops.aten.stack, zip(*states, strict=True))


def _layer(call: OperatorCall, rules: Rules) -> Recurrence | None:
    """Return what all layers of a call have in common, or None where torch computes it."""
    tensors = (call.inputs, *call.states, *call.weights)
    if not computes_now() or any(map(has_tangent, tensors)):
        return None
    if not all(is_plain(tensor, _DTYPES) for tensor in tensors):
        return None
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    dtypes = {tensor.dtype for tensor in tensors}
    if autocast not in (None, torch.bfloat16) or (autocast is None and len(dtypes) > 1):
        return None
    in_bf16 = autocast is not None or dtypes == {torch.bfloat16}
    if in_bf16 and not rules.operators.keys().isdisjoint(_COMPOSED):
        return None
    offsets = offsets_of(call)
    if offsets is None or not are_shapes_right(call) or not is_large(call, offsets.numel() - 1):
        return None
    is_packed = call.batch_sizes is not None
    return Recurrence(call.mode, offsets, is_packed, False, in_bf16, _dtypes(call, in_bf16))


def _dtypes(call: OperatorCall, in_bf16: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of outputs and cells: under autocast, those of torch's products and what is added to them."""
    if not in_bf16:
        return torch.float32, torch.float32
    if call.is_onednns:
        return torch.bfloat16, torch.bfloat16
    of_state = torch.promote_types(call.states[-1].dtype, torch.bfloat16)
    is_product = call.mode in (RELU, TANH) or call.is_projected
    return (torch.bfloat16 if is_product else of_state), of_state


def is_large(call: OperatorCall, steps: int) -> bool:
    """Whether a call is large enough that it is faster in C."""
    hidden, batch = call.weights[1].numel(), call.states[0].size(1)
    fewest = _FEWEST_BESIDE_ONEDNN if call.is_onednns else _FEWEST_STEPS[call.mode][not call.is_trained]
    return steps >= fewest and (call.is_trained or batch > 1 or hidden <= _MOST_OF_ONE)


def is_faster_than_onednn(call: OperatorCall) -> bool:
    """Whether an LSTM in fp32 that is not measured is faster in C."""
    steps, (_, batch, units) = call.inputs.size(1 if call.batch_first else 0), call.states[-1].shape
    if not call.is_trained or steps < _FEWEST_STEPS[LSTM][0]:
        return False
    return units <= _MOST_UNITS and batch * units <= _MOST_OF_A_STEP
