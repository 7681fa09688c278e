"""Linear layers with norms, activations and dropouts between them, as one autograd node (``chain.c``).

For small layers, operators take longer to be dispatched than to compute: modules, operators and autograd nodes of torch
take microseconds each. All is in fp32, on any CPU.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.fp32 import COMPILED, TORCH, Arguments, is_compiled, rule_of
from nano_loop.kernels.linear.chain_layers import BATCH_NORM, LAYER_NORM, NONE, OPERATORS, ChainLayer
from nano_loop.kernels.memory import FP32, UnsupportedTensorError, check, empty
from nano_loop.kernels.rounding import PRODUCT, may_round
from nano_loop.patching.ownership import rule_for
from nano_loop.patching.torch_private import below_autocast, is_batched

KERNEL = CompiledKernel("chain", {"chain_forward": (FP32,) * 3, "chain_backward": (FP32,) * 6})
#: The name of the rule of a model whose chains are computed in C.
RULE = rule_of(KERNEL)
#: Multiplications of a forward from which on a chain of linear layers alone is computed in C before it is measured.
LEAST = 3 << 18
_BYTES, _MATRIX = 4, 2

#: The running mean and the running variance of a batch norm, or None.
Buffers = tuple[Tensor, Tensor] | None
#: `Call` and `Layer` of the C file: numbers, places in the call's memory, and pointers.
_CALL, _LAYER = "2q", "4q4d18q"
#: A place in the output, or in its gradient.
_ELSEWHERE = -1


class Chain:
    """Linear layers, each of which multiplies the output of the one before.

    Parameters
    ----------
    layers : sequence of ChainLayer
        The layers.
    """

    def __init__(self, layers: Sequence[ChainLayer]) -> None:
        self.layers = tuple(layers)
        self.inputs, self.outputs = self.layers[0].inputs, self.layers[-1].outputs
        #: The shapes of the parameters of all layers.
        self.shapes = [shape for layer in self.layers for shape in layer.shapes]
        self.multiplications = [layer.inputs * layer.outputs for layer in self.layers]
        #: Whether there are no norms and dropouts.
        self.is_plain = not any(layer.norm.number or layer.dropout for layer in self.layers)
        self.has_batch_norms = any(layer.norm.number == BATCH_NORM for layer in self.layers)
        last = self.layers[-1]
        #: Whether the backward reads the output.
        self.reads_output = last.activation.number != NONE and not last.keeps_arguments
        self._tensors = [*self._find_tensors()]
        self._pack = struct.Struct(_CALL + _LAYER * len(self.layers)).pack
        self._in_memory: tuple[int, Any] = 0, None  # of the last number of rows

    def _find_tensors(self) -> Iterator[tuple[tuple[float, ...], int, int, int, int, int]]:
        """Yield of each layer its constants and the numbers of its tensors among all of them; -1 is none."""
        at, mask = 0, len(self.shapes)
        for layer in self.layers:
            norm = at + 1 + layer.has_bias if layer.norm.number else -1
            bias, norm_bias = at + 1 if layer.has_bias else -1, norm + 1 if layer.norm.number else -1
            yield layer.constants, at, bias, norm, norm_bias, mask if layer.dropout else -1
            at, mask = at + len(layer.shapes), mask + bool(layer.dropout)

    def __str__(self) -> str:
        """Return what its time depends on, in words."""
        words = (f"{layer.outputs}:{layer.norm.number}:{layer.activation.number}" for layer in self.layers)
        return "-".join([str(self.inputs), *words])

    @functools.cached_property
    def without_dropouts(self) -> Chain:
        """The same layers without dropouts."""
        return Chain([layer._replace(dropout=0.0) for layer in self.layers])

    def masks(self, shape: Sequence[int]) -> list[Tensor]:
        """Draw the masks of the dropouts as torch draws them.

        Parameters
        ----------
        shape : sequence of int
            The shape of the outputs but for its last number.
        """
        return [empty(*shape, layer.outputs).bernoulli_(1 - layer.dropout) for layer in self.layers if layer.dropout]

    def computed(
        self, x: Tensor, parameters: Sequence[Tensor], masks: Sequence[Tensor] = (), buffers: Sequence[Buffers] = ()
    ) -> Tensor:
        """Compute by the C function.

        Parameters
        ----------
        x : torch.Tensor
            Of shape (..., inputs of the first layer).
        parameters : sequence of torch.Tensor
            Those of all layers, of the shapes `shapes`.
        masks : sequence of torch.Tensor
            What `masks` returns.
        buffers : sequence of pair of torch.Tensor or None
            Of each layer, the statistics that are updated. By default none are.
        """
        output: Tensor = _ChainNode.apply(self, buffers, x, *parameters, *masks)  # type: ignore[no-untyped-call]
        return output

    def by_operators(self, x: Tensor, parameters: Sequence[Tensor], masks: Sequence[Tensor] = ()) -> Tensor:
        """Compute the same by torch's operators, which can be differentiated again."""
        of_layers, of_dropouts = iter(parameters), iter(masks)
        for layer in self.layers:
            x = F.linear(x, next(of_layers), next(of_layers) if layer.has_bias else None)
            if layer.norm.number == BATCH_NORM:
                weight, bias = next(of_layers), next(of_layers)
                x = F.batch_norm(x, None, None, weight, bias, training=True, eps=layer.norm.eps)
            elif layer.norm.number == LAYER_NORM:
                x = F.layer_norm(x, x.shape[-1:], next(of_layers), next(of_layers), layer.norm.eps)
            number, slope = layer.activation
            x = OPERATORS[number](x, slope)
            x = x * (next(of_dropouts) / (1 - layer.dropout)) if layer.dropout else x
        return x

    def accepts(self, x: Tensor, parameters: Sequence[Tensor]) -> bool:
        """Whether the C function takes the tensors: it reads as many numbers as the layers say."""
        if not FP32.accepts(x) or not x.numel() or x.dim() < 1 or x.size(-1) != self.inputs:
            return False
        for parameter, shape in zip(parameters, self.shapes, strict=True):
            if parameter.shape != shape or not FP32.accepts(parameter):
                return False
        return True

    def accepts_batches(self, x: Tensor, buffers: Sequence[Buffers]) -> bool:
        """Whether batch norms take the statistics and the input, whose last dimension is that of the channels."""
        if x.dim() != _MATRIX or len(x) < _MATRIX:
            return False
        return all(
            tensor.shape == (layer.outputs,) and FP32.accepts(tensor)
            for layer, statistics in zip(self.layers, buffers, strict=True)
            for tensor in statistics or ()
        )

    def in_memory(self, rows: int) -> tuple[list[tuple[int, ...]], int, int]:
        """Return where the numbers of each layer are, and how many are kept and how many are gradients of sums."""
        known, places = self._in_memory
        if known != rows:
            places = self._put_in_memory(rows)
            self._in_memory = rows, places
        return places  # type: ignore[no-any-return]

    def _put_in_memory(self, rows: int) -> tuple[list[tuple[int, ...]], int, int]:
        places: list[tuple[int, ...]] = []
        at = gradients = 0
        for number, layer in enumerate(self.layers):
            size, is_last, output = rows * layer.outputs, number + 1 == len(self.layers), _ELSEWHERE
            if not is_last:
                output, at = at, at + size
            argument, at = (at, at + size) if layer.keeps_arguments else (output, at)
            sums = mean = deviation = argument
            if layer.norm.number:
                statistics = layer.outputs if layer.norm.number == BATCH_NORM else rows
                sums, mean, deviation = at, at + size, at + size + statistics
                at = deviation + statistics
            of_normalized = of_sums = _ELSEWHERE
            if not (is_last and layer.is_linear):
                of_sums, gradients = gradients, gradients + size
            if layer.norm.number == LAYER_NORM:
                of_normalized, gradients = gradients, gradients + size
            places.append((sums, mean, deviation, argument, output, of_normalized, of_sums))
        return places, at, gradients

    def packed(
        self,
        rows: int,
        places: Sequence[tuple[int, ...]],
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor] = (),
        buffers: Sequence[Buffers] = (),
    ) -> bytes:
        """Return a call as the C function reads it.

        Parameters
        ----------
        rows : int
            Of the input.
        places : sequence of tuple of int
            What `in_memory` returns.
        tensors : sequence of torch.Tensor
            The parameters, and then the masks.
        gradients : sequence of torch.Tensor
            Those of the parameters.
        buffers : sequence of pair of torch.Tensor or None
            See `computed`.
        """
        pointers = [*[tensor.data_ptr() for tensor in tensors], 0]
        of_parameters = [*[tensor.data_ptr() for tensor in gradients], 0] if gradients else [0] * len(pointers)
        values: list[float] = [rows, len(self.layers)]
        for at, (constants, weight, bias, norm_weight, norm_bias, mask) in enumerate(self._tensors):
            pair = buffers[at] if buffers else None
            values += (
                *constants,
                *places[at],
                *(pointers[weight], pointers[bias], pointers[norm_weight], pointers[norm_bias], pointers[mask]),
                *(of_parameters[weight], of_parameters[bias], of_parameters[norm_weight], of_parameters[norm_bias]),
                *((0, 0) if pair is None else (pair[0].data_ptr(), pair[1].data_ptr())),
            )
        return self._pack(*values)


def compute(chain: Chain, x: Tensor, parameters: Sequence[Tensor], buffers: Sequence[Buffers]) -> Tensor | None:
    """Compute layers by the C function for a model with its rule, or return None where torch has to compute.

    torch computes where the rule says so, and where products may round their inputs.
    """
    rule = rule_for(RULE)
    if rule is None or x.dtype is not torch.float32:
        return None
    x = x.contiguous()
    if not chain.accepts(x, parameters) or (chain.has_batch_norms and not chain.accepts_batches(x, buffers)):
        return None
    rows, timed = x.numel() // chain.inputs, chain.without_dropouts
    guess = TORCH if chain.is_plain and rows * sum(chain.multiplications) < LEAST else None
    algorithms = {
        TORCH: lambda leaf: timed.by_operators(x.detach(), [*map(leaf, parameters)]),
        COMPILED: lambda leaf: timed.computed(x.detach(), [*map(leaf, parameters)]),
    }
    call = Arguments("chain", (timed, x), torch.is_grad_enabled())
    if not is_compiled(rule, call, lambda: algorithms, guess) or may_round(PRODUCT, rows * max(chain.multiplications)):
        return None
    return chain.computed(x, parameters, chain.masks(x.shape[:-1]), buffers)


class _ChainNode(torch.autograd.Function):
    """As `Chain.computed`."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, buffers: Sequence[Buffers], x: Tensor, *tensors: Tensor) -> Tensor:
        rows = x.numel() // chain.inputs
        places, kept, _ = chain.in_memory(rows)
        memory, out = x.new_empty(kept), x.new_empty((*x.shape[:-1], chain.outputs))
        KERNEL("chain_forward", chain.packed(rows, places, tensors, (), buffers), x, memory, out)
        if chain.has_batch_norms:
            increment_version([tensor for pair in buffers if pair is not None for tensor in pair])
        ctx.chain = chain
        ctx.save_for_backward(x, memory, out if chain.reads_output else None, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        chain: Chain = ctx.chain
        x, memory, out, *tensors = ctx.saved_tensors
        count = len(chain.shapes)
        parameters, masks = tensors[:count], tensors[count:]
        none = (None,) * len(masks)
        # For a second derivative, and for many gradients at a time.
        if torch.is_grad_enabled() or is_batched(gradient):
            needs = ctx.needs_input_grad[2 : 3 + count]
            return None, None, *_differentiable(chain, x, parameters, masks, gradient, needs), *none
        gradient = gradient.contiguous()
        out = gradient if out is None else out  # then it is not read
        check(masks, (FP32,) * len(masks))
        if not chain.accepts(x, parameters):
            raise UnsupportedTensorError("the input or a weight was replaced between the forward and the backward")
        rows = x.numel() // chain.inputs
        places, kept, of_sums = chain.in_memory(rows)
        if memory.numel() != kept:
            raise UnsupportedTensorError("what was kept for the backward is not what hooks return")
        sums, gradients = x.new_empty(of_sums), [torch.empty_like(parameter) for parameter in parameters]
        of_x = torch.empty_like(x) if ctx.needs_input_grad[2] else None
        call = chain.packed(rows, places, tensors, gradients)
        KERNEL("chain_backward", call, x, memory, out, gradient, sums, of_x)
        return None, None, of_x, *gradients, *none


def _differentiable(
    chain: Chain,
    x: Tensor,
    parameters: Sequence[Tensor],
    masks: Sequence[Tensor],
    gradient: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of the input and of all parameters, which can be differentiated again."""
    with torch.enable_grad(), below_autocast():
        out = chain.by_operators(x, parameters, masks)
    wanted = [tensor for tensor, is_needed in zip([x, *parameters], needs, strict=True) if is_needed]
    computed = iter(
        torch.autograd.grad(out, wanted, gradient, create_graph=torch.is_grad_enabled(), materialize_grads=True)
    )
    return [next(computed) if is_needed else None for is_needed in needs]
