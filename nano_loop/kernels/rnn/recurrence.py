"""One direction of an RNN, GRU or LSTM layer, with the recurrence in a C function (``recurrence.c``).

Products of many inputs, and those of all gradients, are computed once for all time steps. Everything is in fp32, on any
CPU. In reduced precision, products round their factors to bf16 if the CPU has the bf16 instructions of AVX-512.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel, scratch
from nano_loop.kernels.double_backward import gradients_of, save, saved
from nano_loop.kernels.linear import fp32_product, product
from nano_loop.kernels.memory import BYTES, FLOATS, FP32, INT64, empty
from nano_loop.kernels.rnn.recurrent_layer import GATES, GRU, LSTM, Arguments, Recurrence, by_operators
from nano_loop.patching.ownership import rules_now
from nano_loop.patching.torch_private import below_autocast

KERNEL = CompiledKernel(
    "recurrence",
    {
        "recurrence_forward": (*(INT64, FLOATS, *(FP32,) * 5, FLOATS, *(FP32,) * 4, FLOATS, FP32, FP32, BYTES),),
        "recurrence_backward": (
            *(INT64, *(FP32,) * 4, FLOATS, *(FP32,) * 4, FLOATS, FLOATS, FP32, FP32, FLOATS, FP32, FLOATS),
            *(*(FP32,) * 3, BYTES),
        ),
    },
)

#: Number of inputs below which their product is computed within each time step, and the maximum size in bytes of all
#: weights for which it is too: then the product is not stored, and all weights stay in a core's cache.
_FEW_INPUTS, _CACHED = 32, 1 << 20
#: Indices in `Arguments`.
_INPUT_WEIGHT, _BIASES = 1, (3, 4)


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("mode", "steps", "batch", "inputs", "hidden"),
            *("is_reversed", "is_packed", "is_trained", "is_rounded", "gradient_is_rounded"),
        )
    )


def recurrence(layer: Recurrence, arguments: Arguments) -> tuple[Tensor, ...]:
    """Compute one direction of a layer: the outputs, which the backward reads, and the state at each sequence's end.

    An LSTM's cells after the last time step come third.
    """
    results: tuple[Tensor, ...] = _RecurrentLayer.apply(*arguments, layer)  # type: ignore[no-untyped-call]
    return results


class _RecurrentLayer(torch.autograd.Function):
    """Computes `recurrence`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        tensors, layer = Arguments(*args[:-1]), args[-1]
        with below_autocast():
            kept, states = _forward(layer, tensors, any(ctx.needs_input_grad))
        ctx.layer = layer
        save(ctx, tensors, kept, _BIASES if ctx.needs_input_grad[0] else (_INPUT_WEIGHT, *_BIASES))
        ctx.set_materialize_grads(False)
        outputs, state, *cells = states
        dtype, cell_dtype = layer.dtypes
        return outputs.to(dtype), state.to(dtype), *(tensor.to(cell_dtype) for tensor in cells)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, others = saved(ctx, len(Arguments._fields))
        tensors, kept = Arguments(*inputs), _Kept(*others)

        def compute() -> list[Tensor | None]:
            with below_autocast():
                computed = _backward(ctx.layer, tensors, kept, gradients, ctx.needs_input_grad)
            return [
                None if gradient is None or tensor is None else gradient.to(tensor.dtype)
                for gradient, tensor in zip(computed, tensors, strict=True)
            ]

        def by_torch(*tensors: Any) -> tuple[Tensor, ...]:
            wide: list[Any] = [None if tensor is None else tensor.float() for tensor in tensors]
            return by_operators(ctx.layer, Arguments(*wide))

        return gradients_of(ctx, tensors, gradients, compute, by_torch)


class _Kept(NamedTuple):
    """Data for the backward in addition to the arguments: memory of the C function, one row per step and sequence."""

    gates: Tensor | None  # of a GRU or an LSTM
    inner: Tensor | None  # the cells of an LSTM; for a GRU, the values that the reset gate multiplies
    states: Tensor  # the initial states and the outputs, adjacent and in order of computation
    outputs: Tensor | None  # in fp32 if `states` is not

    def before(self, layer: Recurrence, rows: int) -> Tensor:
        """Return the states before each time step for sequences of equal length."""
        return self.states[-rows:] if layer.is_reversed else self.states[:rows]

    def first(self, layer: Recurrence, rows: int) -> Tensor:
        """Return the initial states."""
        return self.states[rows:] if layer.is_reversed else self.states[:-rows]

    def after(self, layer: Recurrence, rows: int) -> Tensor:
        """Return the outputs."""
        return self.states[:rows] if layer.is_reversed else self.states[-rows:]


def _sizes(layer: Recurrence, tensors: Arguments) -> _Call:
    """Return the sizes of a call, for the C function."""
    call = _Call(layer.mode, layer.offsets.numel() - 1, tensors.state.size(0))
    call.hidden = tensors.state.size(1)
    call.is_reversed, call.is_packed, call.is_rounded = layer.is_reversed, layer.is_packed, layer.rounds
    return call


def _is_computed_in_steps(layer: Recurrence, tensors: Arguments) -> bool:
    """Whether inputs are multiplied within time steps: if they are few, or both weights fit into the cache."""
    if not layer.rounds and _has_policy():  # torch's operators may round
        return False
    gates, size = tensors.input_weight.shape
    return size < _FEW_INPUTS or gates * (size + tensors.state.size(1)) * (2 if layer.rounds else 4) <= _CACHED


def _has_policy() -> bool:
    rules = rules_now()
    return rules is not None and rules.policy is not None


def _forward(layer: Recurrence, tensors: Arguments, is_trained: bool) -> tuple[_Kept, tuple[Tensor, ...]]:
    """Return the data for the backward, and the outputs and states."""
    inputs, input_weight, hidden_weight, input_bias, hidden_bias, state, cells = tensors
    call, rows, is_rnn = _sizes(layer, tensors), inputs.size(0), GATES[layer.mode] == 1
    call.is_trained = is_trained
    gates: Tensor | None = None
    in_steps: tuple[Any, ...] = (None, None, None)
    if _is_computed_in_steps(layer, tensors):
        call.inputs = inputs.size(1)
        in_steps = layer.as_operands(inputs), _wide(input_weight), _wide(input_bias)
        gates = empty(rows, GATES[layer.mode] * call.hidden) if is_trained and not is_rnn else None
    else:
        gates = _product(layer, inputs, input_weight.t(), input_bias)
    kept = _Kept(
        gates,
        empty(rows, call.hidden) if layer.mode == LSTM or (layer.mode == GRU and is_trained) else None,
        layer.operands(rows + call.batch, call.hidden),
        empty(rows, call.hidden) if layer.rounds and (layer.mode != LSTM or layer.dtypes[0] is torch.float32) else None,
    )
    first, states = kept.first(layer, rows), kept.after(layer, rows)
    first.copy_(layer.as_operands(state))
    outputs = kept.outputs if layer.rounds else states
    last, last_cells = empty(call.batch, call.hidden), None if cells is None else empty(call.batch, call.hidden)
    weights, biases = (in_steps[1], _wide(hidden_weight)), (in_steps[2], _wide(hidden_bias))
    _run(
        "forward",
        call,
        *(layer.offsets, in_steps[0], *weights, *biases, _wide(state)),
        *(first if layer.rounds else None, _wide(cells), gates, kept.inner, outputs),
        *(states if layer.rounds else None, last, last_cells),
    )
    if outputs is None or layer.dtypes[0] is not torch.float32:
        outputs = states[:, : call.hidden]
    if is_rnn:
        kept = kept._replace(gates=None)
    return kept, (outputs, last) if last_cells is None else (outputs, last, last_cells)


def _backward(
    layer: Recurrence, tensors: Arguments, kept: _Kept, gradients: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments that require one."""
    inputs, input_weight, hidden_weight, _, _, state, cells = tensors
    call, rows = _sizes(layer, tensors), inputs.size(0)
    call.inputs = inputs.size(1)
    output_gradients, of_state, of_cells = [*gradients, None][:3]
    if output_gradients is not None:
        call.gradient_is_rounded = layer.rounds and output_gradients.dtype is torch.bfloat16
        output_gradients = output_gradients.contiguous() if call.gradient_is_rounded else _wide(output_gradients)
    of_first = _copy(of_state, call.batch, call.hidden)
    of_first_cells = None if cells is None else _copy(of_cells, call.batch, call.hidden)
    # For a GRU, the C function writes one more block: the gradients for hidden states start with the new gate, and
    # those for inputs end with it.
    hidden, is_gru = call.hidden, layer.mode == GRU
    width = (GATES[layer.mode] + is_gru) * hidden
    of_gates, sums = layer.operands(rows, width), empty(width)
    before = layer.operands(rows, call.hidden) if layer.is_packed else kept.before(layer, rows)
    in_c = not layer.rounds and not _has_policy()  # otherwise torch's operators may round
    products = [
        empty(*tensor.shape) if in_c and is_needed else None
        for tensor, is_needed in zip(tensors[:3], needs, strict=False)
    ]
    states = kept.after(layer, rows)
    _run(
        "backward",
        call,
        *(layer.offsets, *map(_wide, (inputs, input_weight) if in_c else (None, None))),
        *map(_wide, (hidden_weight, state)),
        *(kept.first(layer, rows) if layer.rounds else None, _wide(cells), kept.gates, kept.inner),
        *((kept.outputs, states) if layer.rounds else (states, None)),
        *(output_gradients, of_first, of_first_cells, of_gates, sums, before, *products),
    )

    def in_order(gradient: Tensor) -> Tensor:
        return gradient.roll(-hidden, 0) if is_gru else gradient

    def of_weight(gradient: Tensor, multiplied: Tensor, weight: Tensor) -> Tensor:
        return _product(layer, gradient.t(), multiplied[:, : weight.size(1)], dtype=weight.dtype)

    if not in_c:
        of_sums = of_gates[:, hidden if is_gru else 0 : width]
        of_states = of_gates[:, : GATES[layer.mode] * hidden]
        products = [
            _product(layer, of_sums, input_weight, dtype=inputs.dtype) if needs[0] else None,
            of_weight(of_sums, inputs, input_weight) if needs[1] else None,
            in_order(of_weight(of_states, before, hidden_weight)) if needs[2] else None,
        ]
    of_input_bias, of_hidden_bias = (sums[hidden:], sums[:-hidden]) if is_gru else (sums, sums)
    return (
        *products,
        of_input_bias.clone() if needs[3] else None,
        in_order(of_hidden_bias) if needs[4] else None,
        of_first if needs[5] else None,
        of_first_cells if needs[6] else None,
    )


def _product(
    layer: Recurrence, a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a product: of rounded matrices if requested and supported by the CPU, otherwise in fp32."""
    if layer.in_bf16 and product.supports(a, b, bias):
        return product.product(a, b, bias, dtype=dtype)
    a, b, bias = a.float(), b.float(), _wide(bias)
    if _has_policy():  # torch's operators may round
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return fp32_product.product(a, b, bias)


def _wide(tensor: Tensor | None) -> Any:
    """Return a tensor in the format of the C functions: contiguous, in fp32."""
    return None if tensor is None else tensor.float().contiguous()


def _copy(gradient: Tensor | None, *sizes: int) -> Tensor:
    """Return a copy of a gradient in fp32, or zeros."""
    return empty(*sizes).zero_() if gradient is None else empty(*sizes).copy_(gradient)


def _run(direction: str, call: _Call, *tensors: Tensor | None) -> None:
    memory = scratch(KERNEL.bytes_of(call, int(direction == "backward")))
    KERNEL(f"recurrence_{direction}", call, *tensors, memory)
