"""Custom operators of torch for kernels that Inductor calls as they are: it would decompose them, or take longer.

They are registered in the namespace ``nano_loop`` when this module is imported.
"""
# Annotations are not strings here: torch reads the operators' schemas from them.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.attention import blocked_attention as blocks
from nano_loop.kernels.loss import cross_entropy as losses

_Three = tuple[Tensor, Tensor, Tensor]


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


def _operator(
    name: str,
    forward: Callable[..., Sequence[Tensor]],
    outputs: Callable[..., Sequence[Tensor]],
    backward: Callable[..., Sequence[Tensor]],
    gradients: Callable[..., Sequence[Tensor]],
) -> Callable[..., Any]:
    """Declare an operator that torch does not look into, and return it.

    Parameters
    ----------
    name : str
        The name. The backward is another operator, ``name_backward``.
    forward : callable
        Takes tensors, and then numbers. Returns the output, and tensors for the backward.
    outputs : callable
        Returns empty tensors as `forward` does.
    backward : callable
        Takes the gradient of the output, the other results of `forward`, and its arguments. Returns the gradients of
        its first arguments.
    gradients : callable
        Returns empty tensors as `backward` does.
    """
    operator = torch.library.custom_op(f"nano_loop::{name}", forward, mutates_args=(), device_types="cpu")
    operator.register_fake(outputs)
    derivative = torch.library.custom_op(f"nano_loop::{name}_backward", backward, mutates_args=(), device_types="cpu")
    derivative.register_fake(gradients)

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


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    mask = None if mask is None else blocks.as_mask(mask, query, key)
    query, key, value = map(blocks.with_columns, (query, key, value))
    return blocks.forward(query, key, value, mask, kept, dropout_p, is_causal, scale)


def _attention_outputs(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = _by_rows(query, (*query.shape[:3], value.size(3)))
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _attention_backward(
    gradient: Tensor,
    log_sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> _Three:
    mask = None if mask is None else blocks.as_mask(mask, query, key)
    gradient, query, key, value = map(blocks.with_columns, (gradient, query, key, value))
    of_query, of_key, of_value = gradients = _attention_gradients(gradient, log_sums, query, key, value)
    blocks.backward(gradient, log_sums, query, key, value, mask, kept, dropout_p, is_causal, scale, gradients)
    return of_query, of_key, of_value


def _attention_gradients(
    gradient: Tensor, log_sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> _Three:
    return _by_rows(query, query.shape), _by_rows(key, key.shape), _by_rows(value, value.shape)


def _by_rows(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor in which the heads of a row lie side by side."""
    batch, heads, rows, columns = shape
    return tensor.new_empty((batch, rows, heads, columns)).transpose(1, 2)


#: Attention in blocks; see `nano_loop.kernels.attention.blocked_attention.forward`.
blocked_attention = _operator(
    "blocked_attention", _attention, _attention_outputs, _attention_backward, _attention_gradients
)


def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> _Three:
    results = losses.forward(logits, target, ignore_index, label_smoothing)
    if results is None:
        torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index)
        raise IndexError("a target of cross-entropy is not a class")
    return results


def _cross_entropy_outputs(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.size(0), dtype=torch.float32) for _ in range(3))


def _cross_entropy_backward(
    factors: Tensor,
    maxima: Tensor,
    log_sums: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> list[Tensor]:
    return [losses.backward(factors, maxima, log_sums, logits, target, ignore_index, label_smoothing, logits.dtype)]


def _cross_entropy_gradients(
    factors: Tensor, maxima: Tensor, log_sums: Tensor, logits: Tensor, *_: Any
) -> list[Tensor]:
    return [torch.empty_like(logits)]


#: The losses of rows; see `nano_loop.kernels.loss.cross_entropy.forward`. A target that is no class is torch's error.
cross_entropy = _operator(
    "cross_entropy", _cross_entropy, _cross_entropy_outputs, _cross_entropy_backward, _cross_entropy_gradients
)


def _batch_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> _Three:
    return torch.native_batch_norm(input, weight, bias, None, None, True, 0.0, eps)


def _batch_norm_outputs(input: Tensor, weight: Tensor, *_: Any) -> _Three:
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


def _batch_norm_backward(
    gradient: Tensor, mean: Tensor, inverse_std: Tensor, input: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> _Three:
    # torch's kernel takes ten times as long where the two are laid out differently.
    for layout, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if input.dim() == dimensions and input.is_contiguous(memory_format=layout):
            gradient = gradient.contiguous(memory_format=layout)
    of_input, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, input, weight, None, None, mean, inverse_std, True, eps, [True, True, True]
    )
    return of_input, of_weight, of_bias


def _batch_norm_gradients(gradient: Tensor, mean: Tensor, inverse_std: Tensor, *inputs: Any) -> _Three:
    return _batch_norm_outputs(*inputs)


#: Batch norm in training by torch's kernel: output, means, and 1 / standard deviation. Inductor's takes three times as
#: long.
batch_norm = _operator("batch_norm", _batch_norm, _batch_norm_outputs, _batch_norm_backward, _batch_norm_gradients)
