"""Custom operators of torch for kernels that Inductor calls as they are: it would decompose them, or take longer.

They are registered in the namespace ``nano_loop`` when this module is imported.
"""
# Annotations are not strings here: torch reads the schema of `kept` from them.

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.attention import blocked_attention as blocks
from nano_loop.kernels.loss import cross_entropy as losses


@torch.library.custom_op("nano_loop::kept", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def kept(
    size: Sequence[int], stride: Sequence[int], probability: float, number: int, *, device: torch.device
) -> Tensor:
    """Return a mask of ones with this probability, drawn as `torch.Tensor.bernoulli_` draws it.

    Of bytes, since what Inductor makes takes twenty times as long to read a mask of bool. An operator has the strides
    of the plain loop, on which the order of the draws depends. torch would call it once for two calls with the same
    arguments, so that `number` differs between them; and asks for the `device` where it recomputes an activation.
    """
    return torch.empty_strided(size, stride, dtype=torch.uint8, device=device).bernoulli_(probability)


@kept.register_fake
def _kept_like(
    size: Sequence[int], stride: Sequence[int], probability: float, number: int, *, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=torch.uint8, device=device)


class _Computation(NamedTuple):
    """What an operator computes, and what returns empty tensors as it does."""

    compute: Callable[..., Sequence[Tensor]]
    fake: Callable[..., Sequence[Tensor]]


def _operator(name: str, arguments: str, saved: str, forward: _Computation, backward: _Computation) -> Any:
    """Declare an operator that torch does not look into, and return it.

    Parameters
    ----------
    name : str
        The name. The backward is another operator, ``name_backward``.
    arguments : str
        Tensors, and then numbers, as in torch's schemas.
    saved : str
        What the operator returns for the backward, in addition to the output.
    forward : _Computation
        Takes the arguments. Returns the output, and tensors for the backward.
    backward : _Computation
        Takes the gradient of the output, the other results of `forward`, and the arguments. Returns a list of the
        gradients of the first arguments.
    """

    def declared(name: str, schema: str, computation: _Computation) -> Any:
        options: dict[str, Any] = {"mutates_args": (), "device_types": "cpu", "schema": schema}
        operator = torch.library.custom_op(f"nano_loop::{name}", computation.compute, **options)
        operator.register_fake(computation.fake)
        return operator

    operator = declared(name, f"({arguments}) -> (Tensor output, {saved})", forward)
    derivative = declared(f"{name}_backward", f"(Tensor gradient, {saved}, {arguments}) -> Tensor[]", backward)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors = [value for value in inputs if value is None or isinstance(value, Tensor)]
        ctx.count, ctx.numbers = len(inputs), inputs[len(tensors) :]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:], *tensors)

    def differentiate(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        computed = derivative(gradient, *ctx.saved_tensors, *ctx.numbers)
        return *computed, *[None] * (ctx.count - len(computed))

    operator.register_autograd(differentiate, setup_context=save)
    return operator


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    mask = None if mask is None else blocks.as_mask(mask, query, key)
    query, key, value = map(blocks.with_columns, (query, key, value))
    return blocks.forward(query, key, value, mask, *others)


def _attention_outputs(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = _by_rows(query, (*query.shape[:3], value.size(3)))
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _attention_backward(
    gradient: Tensor, log_sums: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Any
) -> list[Tensor]:
    mask = None if mask is None else blocks.as_mask(mask, query, key)
    gradient, query, key, value = map(blocks.with_columns, (gradient, query, key, value))
    gradients = _attention_gradients(gradient, log_sums, query, key, value)
    blocks.backward(gradient, log_sums, query, key, value, mask, *[*others, gradients])
    return gradients


def _attention_gradients(gradient: Tensor, log_sums: Tensor, *inputs: Any) -> list[Tensor]:
    return [_by_rows(tensor, tensor.shape) for tensor in inputs[:3]]


def _by_rows(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor in which the heads of a row lie side by side."""
    batch, heads, rows, columns = shape
    return tensor.new_empty((batch, rows, heads, columns)).transpose(1, 2)


#: Attention in blocks; see `nano_loop.kernels.attention.blocked_attention.forward`.
blocked_attention = _operator(
    "blocked_attention",
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? kept, float dropout_p, bool is_causal, float scale",
    "Tensor log_sums",
    _Computation(_attention, _attention_outputs),
    _Computation(_attention_backward, _attention_gradients),
)


def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Sequence[Tensor]:
    results = losses.forward(logits, target, ignore_index, label_smoothing)
    if results is None:
        torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index)
        raise IndexError("a target of cross-entropy is not a class")
    return results


def _cross_entropy_outputs(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.size(0), dtype=torch.float32) for _ in range(3))


def _cross_entropy_backward(
    factors: Tensor, maxima: Tensor, log_sums: Tensor, logits: Tensor, *others: Any
) -> list[Tensor]:
    return [losses.backward(factors, maxima, log_sums, logits, *[*others, logits.dtype])]


#: The losses of rows; see `nano_loop.kernels.loss.cross_entropy.forward`. A target that is no class is torch's error.
cross_entropy = _operator(
    "cross_entropy",
    "Tensor logits, Tensor target, int ignore_index, float label_smoothing",
    "Tensor maxima, Tensor log_sums",
    _Computation(_cross_entropy, _cross_entropy_outputs),
    _Computation(_cross_entropy_backward, lambda factors, maxima, log_sums, logits, *_: [torch.empty_like(logits)]),
)


def _batch_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Sequence[Tensor]:
    return torch.native_batch_norm(input, weight, bias, None, None, True, 0.0, eps)


def _batch_norm_outputs(input: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


def _batch_norm_backward(
    gradient: Tensor, mean: Tensor, inverse_std: Tensor, input: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> list[Tensor]:
    # torch's kernel takes ten times as long where the two are laid out differently.
    for layout, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if input.dim() == dimensions and input.is_contiguous(memory_format=layout):
            gradient = gradient.contiguous(memory_format=layout)
    of_all = [True, True, True]
    statistics = None, None, mean, inverse_std
    return list(torch.ops.aten.native_batch_norm_backward(gradient, input, weight, *statistics, True, eps, of_all))


#: Batch norm in training by torch's kernel: output, means, and 1 / standard deviation. Inductor's takes three times as
#: long.
batch_norm = _operator(
    "batch_norm",
    "Tensor input, Tensor weight, Tensor bias, float eps",
    "Tensor mean, Tensor inverse_std",
    _Computation(_batch_norm, _batch_norm_outputs),
    _Computation(_batch_norm_backward, lambda gradient, mean, inverse_std, *inputs: [*_batch_norm_outputs(*inputs)]),
)
