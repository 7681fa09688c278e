"""torch's RNN, GRU and LSTM operators, computed layer by layer by `nano_loop.kernels.rnn.recurrence`.

torch composes each time step of several operators, except for LSTMs with sequences of equal length, which oneDNN
computes. For these, the faster algorithm is chosen. torch computes LSTMs with projections (``proj_size``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import denormals, override
from nano_loop.kernels.linear import product
from nano_loop.kernels.memory import computes_now, has_tangent, is_plain
from nano_loop.kernels.override import COMPILED, FP32, REFERENCE, ROUNDED, TORCH, Algorithm, Call, Override, choose
from nano_loop.kernels.rnn import recurrence
from nano_loop.kernels.rnn.recurrent_layer import GATES, GRU, LSTM, RELU, TANH, Arguments, Recurrence
from nano_loop.patching.operators import Kernel
from nano_loop.patching.ownership import NO_RULES, rules_now
from nano_loop.patching.torch_private import below_autocast, below_torch_functions
from nano_loop.policy import product_precision

#: Number of time steps of a measured LSTM, or the steps for this many multiplications if that is more. The overhead per
#: call should not decide.
_TIMED_STEPS, _TIMED_MULTIPLICATIONS = 16, 1 << 26
#: Maximum hidden size of an fp32 LSTM that is not left to oneDNN, and maximum hidden size times batch size. Larger
#: weights exceed a core's cache, and for larger batches oneDNN's products per time step are as fast.
_MOST_UNITS, _MOST_OF_A_STEP = 256, 1 << 14
#: Minimum number of multiplications of a bf16 LSTM. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 22
#: Minimum number of time steps for C, by mode, with and without a backward: for fewer, Python's overhead decides.
_FEWEST_STEPS = {RELU: (16, 24), TANH: (16, 24), LSTM: (8, 16), GRU: (8, 16)}
#: Minimum number of time steps of an LSTM that oneDNN would otherwise compute.
_FEWEST_BESIDE_ONEDNN = 4
#: Maximum multiplications per time step for batch size 1 without a backward: packing more weights takes too long.
_MOST_OF_ONE = 1 << 16
_DTYPES = torch.float32, torch.bfloat16
_MATRIX, _SEQUENCES = 2, 3
#: Operators that torch uses for a time step under autocast, and for which a user may want another dtype.
_COMPOSED = ("linear", "sigmoid", "sigmoid_", "tanh", "tanh_", "relu")


@dataclass(frozen=True)
class _Arguments:
    """The arguments of one of torch's recurrent operators."""

    mode: int  # that of `Recurrence`
    #: Of shape (steps, batch, input size), (batch, steps, input size) if `batch_first`; packed: (rows, input size).
    inputs: Tensor
    batch_sizes: Tensor | None  # the number of sequences in each time step of packed inputs
    states: tuple[Tensor, ...]  # the initial hidden states, and the initial cells of an LSTM
    weights: tuple[Tensor, ...]  # of all directions of all layers
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    is_trained: bool = False  # whether a backward will follow

    @functools.cached_property
    def layer(self) -> Recurrence | None:
        """The common properties of all layers, or None if torch must compute. First accessed inside the call."""
        return _layer(self)

    @property
    def uses_onednn(self) -> bool:
        """Whether torch uses oneDNN for the layers."""
        return self.mode == LSTM and self.batch_sizes is None

    @property
    def multiplications(self) -> int:
        """The multiplications per layer and direction of an LSTM with sequences of equal length; 0 otherwise."""
        if self.mode != LSTM or self.batch_sizes is not None or self.inputs.dim() != _SEQUENCES:
            return 0
        first, second, _ = self.inputs.shape
        return first * second * sum(weight.numel() for weight in self.weights[:_MATRIX])

    @property
    def layers(self) -> list[Arguments]:
        """The tensors of all directions of all layers, each with the operator's inputs."""
        count = _MATRIX * (1 + self.has_biases)
        layers = []
        for at, states in enumerate(zip(*(state.unbind(0) for state in self.states), strict=True)):
            input_weight, hidden_weight, *biases = self.weights[at * count : (at + 1) * count]
            input_bias, hidden_bias = biases or (None, None)
            cells = states[1] if self.mode == LSTM else None
            weights = input_weight, hidden_weight, input_bias, hidden_bias
            layers.append(Arguments(self.inputs, *weights, states[0], cells))
        return layers

    def of(self, tensors: Sequence[Tensor]) -> _Arguments:
        """Return the arguments with the inputs, states and weights replaced."""
        inputs, *others = tensors
        count = len(self.states)
        return replace(self, inputs=inputs, states=(*others[:count],), weights=(*others[count:],))


def _supports(mode: int, is_packed: bool, kernel: Kernel, inputs: Tensor, *args: Any) -> Call:
    batch_sizes, (states, weights, *numbers) = (args[0], args[1:]) if is_packed else (None, args)
    states = tuple(states) if mode == LSTM else (states,)
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (inputs, *weights))
    call = replace(_Arguments(mode, inputs, batch_sizes, states, tuple(weights), *numbers), is_trained=is_trained)
    tensors = inputs, *states, *weights
    return Call(
        "lstm",
        tensors,
        (call.batch_first, call.has_biases, call.bidirectional, call.num_layers, is_trained),
        kernel,
        call.multiplications,
        call,
        len(tensors) if is_trained else 0,
        rough=(0, 1),
        timed=_timed,
    )


def _computed(of: Call) -> tuple[Tensor, ...] | None:
    """Compute one of torch's operators, or return None if torch's kernel must."""
    call, layer = of.details, of.details.layer
    if layer is None:
        return None
    if call.uses_onednn:
        if layer.in_bf16 and not layer.rounds:
            return None
        algorithms = {TORCH: _by_torch, COMPILED: _by_layers}
        if layer.in_bf16:
            is_faster = product.KERNEL.unavailable is None and of.multiplications >= MIN_MULTIPLICATIONS
            algorithms[REFERENCE] = _by_torch_in_fp32
        else:
            is_faster = is_faster_than_onednn(call)
        raced = of._replace(numbers_in="bf16" if layer.in_bf16 else "fp32")
        if choose(rules_now() or NO_RULES, raced, lambda: algorithms, COMPILED if is_faster else TORCH) != COMPILED:
            return None
    with below_torch_functions():
        return _by_layers(of)


def _can_round(of: Call) -> bool:
    """Whether an fp32 LSTM can be computed in C from rounded factors."""
    layer = of.details.layer
    is_fp32 = layer is not None and not layer.in_bf16
    return is_fp32 and of.details.uses_onednn and product.KERNEL.unavailable is None


def _rounded(of: Call) -> tuple[Tensor, ...]:
    with below_torch_functions():
        return _by_layers(of, in_bf16=True)


def _timed(of: Call) -> Call | None:
    """Return some time steps of a call, without dropout, which would advance the generator."""
    call: _Arguments = of.details
    time = 1 if call.batch_first else 0
    steps = max(_TIMED_STEPS, _TIMED_MULTIPLICATIONS * call.inputs.size(time) // of.multiplications)
    call = replace(call, inputs=call.inputs.narrow(time, 0, min(steps, call.inputs.size(time))), dropout=0.0)
    of = of._replace(tensors=(call.inputs, *of.tensors[1:]), details=call)
    return of if GATES[LSTM] * max(tensor.numel() for tensor in of.tensors) <= override.MOST_ELEMENTS else None


def _by_torch(of: Call) -> Any:
    assert of.kernel is not None
    call: _Arguments = of.details.of(of.tensors)
    numbers = call.has_biases, call.num_layers, call.dropout, call.train, call.bidirectional, call.batch_first
    return of.kernel(call.inputs, [*call.states], [*call.weights], *numbers)


def _by_torch_in_fp32(of: Call) -> Any:
    with below_autocast():
        return _by_torch(of)


def _with_denormals_flushed(of: Call) -> Any:
    """Call oneDNN's LSTM backward with vanishing gradients flushed to 0, as in the C function."""
    threads = denormals.count_of_threads()
    try:
        denormals.flush(threads)
        return override.by_kernel(of)
    finally:
        denormals.restore(threads)


def _onednns_backward(kernel: Kernel, *args: Any) -> Call:
    return Call("gradients of lstm", args[:1], args[1:], kernel)


_ROUNDED = Algorithm(ROUNDED, _rounded, FP32, is_exact=False, supports=_can_round, kernel=recurrence.KERNEL.name)
_FLUSHED = Algorithm("flushed", _with_denormals_flushed, _DTYPES, is_raced=False)
#: Calls that do not belong to a set-up model return torch's own result, bitwise identical.
OVERRIDES = (
    *(
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
    ),
    Override("mkldnn_rnn_layer_backward", (_FLUSHED,), _onednns_backward),
)


def _by_layers(of: Call, in_bf16: bool = False) -> tuple[Tensor, ...]:
    call, layer = of.details.of(of.tensors), of.details.layer
    layer = layer._replace(in_bf16=layer.in_bf16 or in_bf16)
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
        outputs = outputs.clone()  # the user may overwrite the outputs before the backward reads them
    outputs = outputs.transpose_(0, 1) if call.batch_first else outputs  # not a view, as in torch
    return outputs, *map(torch.ops.aten.stack, zip(*states, strict=True))


def _layer(call: _Arguments) -> Recurrence | None:
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
    if in_bf16 and not (rules_now() or NO_RULES).operators.keys().isdisjoint(_COMPOSED):
        return None
    offsets = _offsets_of(call)
    if offsets is None or not _are_shapes_right(call) or not is_large(call, offsets.numel() - 1):
        return None
    is_packed = call.batch_sizes is not None
    return Recurrence(call.mode, offsets, is_packed, False, in_bf16, _dtypes(call, in_bf16))


def _offsets_of(call: _Arguments) -> Tensor | None:
    """Return the first row of each time step, and the number of rows; None for steps that torch rejects."""
    if call.inputs.dim() != (_SEQUENCES if call.batch_sizes is None else _MATRIX) or not call.inputs.numel():
        return None
    if call.states[0].dim() != _SEQUENCES:
        return None
    batch = call.states[0].size(1)
    if call.batch_sizes is None:
        count, steps = call.inputs.shape[:2] if call.batch_first else call.inputs.shape[1::-1]
        rows = torch.arange(0, steps * batch + 1, batch, dtype=torch.int64, device="cpu")
        return rows if count == batch else None
    sizes = call.batch_sizes.tolist()
    if sizes != sorted(sizes, reverse=True) or sizes[0] != batch or sizes[-1] < 1 or sum(sizes) != len(call.inputs):
        return None
    return torch.tensor([0, *sizes], dtype=torch.int64, device="cpu").cumsum(0)


def _are_shapes_right(call: _Arguments) -> bool:
    """Whether the shapes are those of torch's modules without projections, on which the C function relies."""
    directions, (_, batch, hidden) = 1 + call.bidirectional, call.states[0].shape
    count, gates = call.num_layers * directions, GATES[call.mode] * hidden
    if any(state.shape != (count, batch, hidden) for state in call.states) or not hidden:
        return False
    of_biases: list[Sequence[int]] = [(gates,)] * (2 * call.has_biases)
    shapes = []
    for at in range(count):
        size = call.inputs.size(-1) if at < directions else hidden * directions
        shapes += [(gates, size), (gates, hidden), *of_biases]
    return [weight.shape for weight in call.weights] == shapes


def _dtypes(call: _Arguments, in_bf16: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of outputs and cells: under autocast, those of torch's products and of their sums."""
    if not in_bf16:
        return torch.float32, torch.float32
    if call.uses_onednn:
        return torch.bfloat16, torch.bfloat16
    of_state = torch.promote_types(call.states[-1].dtype, torch.bfloat16)
    return (torch.bfloat16 if call.mode in (RELU, TANH) else of_state), of_state


def is_large(call: _Arguments, steps: int) -> bool:
    """Whether a call is large enough to be faster in C."""
    hidden, batch = call.weights[1].numel(), call.states[0].size(1)
    fewest = _FEWEST_BESIDE_ONEDNN if call.uses_onednn else _FEWEST_STEPS[call.mode][not call.is_trained]
    return steps >= fewest and (call.is_trained or batch > 1 or hidden <= _MOST_OF_ONE)


def is_faster_than_onednn(call: _Arguments) -> bool:
    """Whether an unmeasured fp32 LSTM is faster in C."""
    steps, (_, batch, units) = call.inputs.size(1 if call.batch_first else 0), call.states[-1].shape
    if not call.is_trained or steps < _FEWEST_STEPS[LSTM][0]:
        return False
    return units <= _MOST_UNITS and batch * units <= _MOST_OF_A_STEP
