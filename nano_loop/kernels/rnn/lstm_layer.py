"""A layer of an LSTM in bf16: large products around all steps, and the recurrence by a C function (``lstm.c``).

oneDNN's backward takes up to four times as long, as if it added the weights' gradients up step by step. The function
needs a CPU with AVX-512's bf16 instructions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel, scratch
from nano_loop.kernels.linear import product
from nano_loop.kernels.memory import BF16, BYTES, FLOATS, FP32, empty
from nano_loop.kernels.replacement import operator_of
from nano_loop.patching.torch_private import in_mode, is_batched

KERNEL = CompiledKernel(
    "lstm",
    {
        "lstm_forward": (BF16, BF16, BF16, FP32, BF16, FP32, FP32, BF16, FP32, BYTES),
        "lstm_backward": (BF16, FP32, FP32, FLOATS, FLOATS, FP32, BF16, FP32, FLOATS, BYTES),
    },
    needs_avx512_bf16=True,
)

#: Number of inputs below which their product is computed in the steps, and number of weights up to which it is: 1 MiB.
_FEW_INPUTS, _CACHED = 32, 1 << 19
#: Of each unit: input, forget, cell and output.
GATES = 4


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("steps", "batch", "inputs", "hidden", "is_reversed", "is_wide")
    )


class Arguments(NamedTuple):
    """The arguments of a layer. All tensors are bfloat16, or all are float32, which products round to bfloat16.

    Attributes
    ----------
    inputs : torch.Tensor
        Of shape (steps, batch, input size).
    input_weight, hidden_weight : torch.Tensor
        The weights, of shapes (4 · hidden, input size) and (4 · hidden, hidden).
    biases : tuple of torch.Tensor
        Two, of shape (4 · hidden,), or none.
    output, cells : torch.Tensor
        The state before the first step, of shape (batch, hidden).
    is_reversed : bool
        Whether the last step is computed first.
    """

    inputs: Tensor
    input_weight: Tensor
    hidden_weight: Tensor
    biases: tuple[Tensor, ...]
    output: Tensor
    cells: Tensor
    is_reversed: bool

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of torch's operator."""
        # Where there are no biases, torch has the weights again, and no gradients for them.
        biases = self.biases or (self.input_weight.detach(), self.hidden_weight.detach())
        return [self.inputs, self.input_weight, self.hidden_weight, *biases, self.output, self.cells]


#: Outputs of all steps, and the output and the cells after the last one.
States = tuple[Tensor, Tensor, Tensor]


def lstm(arguments: Arguments) -> States:
    """Compute a layer of an LSTM.

    Parameters
    ----------
    arguments : Arguments
        With an even number of hidden units, of 16 or more.

    Returns
    -------
    outputs : torch.Tensor
        Of shape (steps, batch, hidden) and the dtype of the arguments.
    output, cells : torch.Tensor
        The state after the last step, of shape (batch, hidden).
    """
    biases = arguments.biases or (None, None)
    states: States = _LstmLayer.apply(*arguments[:3], *biases, *arguments[4:])  # type: ignore[no-untyped-call]
    return states


class _LstmLayer(torch.autograd.Function):
    """As `lstm`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> States:
        # A mode of the user's sees operators only.
        outputs, output, cells, states, first_cells = AS_OPERATOR(*args) if in_mode() else _forward(*args)
        *tensors, ctx.is_reversed = args
        ctx.save_for_backward(*tensors, first_cells, states, outputs)
        ctx.set_materialize_grads(False)
        return outputs, output, cells

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, first_cells, states, outputs = ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None,) * 8
        # For a second derivative, and for many gradients at a time.
        if torch.is_grad_enabled() or any(gradient is not None and is_batched(gradient) for gradient in gradients):
            return *_differentiable(tensors, ctx.is_reversed, gradients, ctx.needs_input_grad), None
        inputs, input_weight, hidden_weight, _, _, output, _ = tensors
        call = _Call(*outputs.shape[:2], 0, outputs.size(2), ctx.is_reversed, _is_wide(outputs))
        gates, bias, of_output, of_cells = _differentiated(call, hidden_weight, first_cells, states, *gradients)
        needs, rows = ctx.needs_input_grad, gates.size(0)
        before = [outputs[1:], output.unsqueeze(0)] if ctx.is_reversed else [output.unsqueeze(0), outputs[:-1]]
        return (
            _product(gates, input_weight).view_as(inputs) if needs[0] else None,
            _product(gates.t(), inputs.reshape(rows, -1)) if needs[1] else None,
            _product(gates.t(), torch.cat(before).view(rows, -1)) if needs[2] else None,
            bias if needs[3] else None,
            bias.clone() if needs[4] else None,
            of_output if needs[5] else None,
            of_cells if needs[6] else None,
            None,
        )


def _forward(
    inputs: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor | None,
    output_bias: Tensor | None,
    output: Tensor,
    cells: Tensor,
    is_reversed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `lstm` does, gates and cells of all steps, and the cells before the first step, both in fp32."""
    steps, batch, size = inputs.shape
    hidden = output.size(1)
    call, dtype = _Call(steps, batch, 0, hidden, is_reversed), inputs.dtype
    inputs, input_weight, hidden_weight = inputs.contiguous(), input_weight.contiguous(), _in_bf16(hidden_weight)
    output, first_cells = _in_bf16(output), cells.float().contiguous()
    states = empty(steps * batch, (GATES + 1) * hidden)
    rows = inputs.view(-1, size)
    in_steps: tuple[Tensor | None, ...] = (None, None)
    if _is_computed_in_steps(size, hidden) or not product.supports(rows, input_weight.t()):
        call.inputs = size + size % 2
        in_steps = tuple(
            F.pad(tensor, (0, 1)) if size % 2 else tensor for tensor in map(_in_bf16, (inputs, input_weight))
        )
    else:
        product.product(rows, input_weight.t(), out=states[:, : GATES * hidden])
    bias = empty(GATES * hidden).zero_()
    for tensor in (input_bias, output_bias):
        bias += 0 if tensor is None else tensor
    rounded = empty(steps, batch, hidden, dtype=torch.bfloat16)
    outputs = rounded if dtype is torch.bfloat16 else empty(steps, batch, hidden, dtype=dtype)
    wide = outputs if _is_wide(outputs) else None
    _run("forward", call, *in_steps, hidden_weight, bias, output, first_cells, states, rounded, wide)
    last = 0 if is_reversed else steps - 1
    last_cells = states[last * batch : (last + 1) * batch, GATES * hidden :]
    return outputs, outputs[last].clone(), last_cells.to(dtype, copy=True), states, first_cells


#: The forward as an operator, of which the first arguments are those of torch's.
AS_OPERATOR = operator_of(
    "lstm",
    "(Tensor inputs, Tensor input_weight, Tensor hidden_weight, Tensor? input_bias, Tensor? output_bias, "
    "Tensor output, Tensor cells, bool is_reversed) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
)


def _differentiable(
    tensors: Sequence[Any], is_reversed: bool, gradients: Sequence[Tensor | None], needs_gradient: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of all tensors, computed in fp32 from operators that can be differentiated again."""
    with torch.enable_grad():
        in_fp32: list[Any] = [None if tensor is None else tensor.float() for tensor in tensors]
        inputs, *weights, output, cells = in_fp32
        state, outputs = (output, cells), []
        for step in reversed(inputs) if is_reversed else inputs:
            state = torch.lstm_cell(step, state, *weights)
            outputs.append(state[0])
        results = (torch.stack(outputs[::-1] if is_reversed else outputs), *state)
    used = [(a, b.float()) for a, b in zip(results, gradients, strict=True) if b is not None]
    outs, of_outs = zip(*used, strict=True)
    wanted = [tensor for tensor, is_needed in zip(tensors, needs_gradient, strict=False) if is_needed]
    computed = iter(torch.autograd.grad(outs, wanted, of_outs, create_graph=torch.is_grad_enabled()))
    return [next(computed) if is_needed else None for is_needed in needs_gradient[: len(tensors)]]


def _differentiated(
    call: _Call,
    hidden_weight: Tensor,
    cells: Tensor,
    states: Tensor,
    of_all: Tensor | None,
    of_last: Tensor | None,
    of_last_cells: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the gates before their activations, of the bias, and of the state before the first step.

    The gates have a row for each step and sequence.
    """
    of_cells = torch.zeros_like(cells) if of_last_cells is None else of_last_cells.float().contiguous()
    gates = empty(call.steps * call.batch, GATES * call.hidden, dtype=torch.bfloat16)
    bias = empty(GATES * call.hidden)
    of_output = empty(call.batch, call.hidden, dtype=torch.float32 if call.is_wide else torch.bfloat16)
    arrived = [None if gradient is None else gradient.contiguous() for gradient in (of_all, of_last)]
    _run("backward", call, _in_bf16(hidden_weight), cells, states, *arrived, of_cells, gates, bias, of_output)
    return gates, bias, of_output, of_cells


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a product in the dtype of `b`."""
    return product.product(a, b, dtype=b.dtype) if product.supports(a, b) else (a.to(b.dtype) @ b)


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32


def _in_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).contiguous()


def _is_computed_in_steps(size: int, hidden: int) -> bool:
    """Whether inputs are multiplied in the steps: where they are few, or the weights of both stay in the cache."""
    return size < _FEW_INPUTS or GATES * hidden * (size + hidden) <= _CACHED


def _run(direction: str, call: _Call, *tensors: Tensor | None) -> None:
    memory = scratch(KERNEL.bytes_of(call, int(direction == "backward")))
    KERNEL(f"lstm_{direction}", call, *tensors, memory)
