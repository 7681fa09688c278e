"""Custom operators of torch for nano_loop's kernels, which Inductor calls as they are and does not decompose.

Each has a function for the CPU, one that gives the outputs' shapes while torch traces, and one for the gradient. They
are registered when this module is imported, in the namespace ``nano_loop``.

Operators that draw random numbers take a number as well: torch removes a second call with the same arguments, although
it would draw other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import blocked_attention, plain_attention
from nano_loop.kernels import cross_entropy as losses

_DRAWS = (torch.Tag.nondeterministic_seeded,)
_NAMESPACE = "nano_loop"


class _Context(SimpleNamespace):
    """What an autograd function of nano_loop gets in place of torch's context: it keeps what is saved."""

    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


# --- masks ---

torch.library.define(
    f"{_NAMESPACE}::kept",
    "(SymInt[] size, SymInt[] stride, float probability, int number, *, Device device) -> Tensor",
    tags=_DRAWS,
)


@torch.library.impl(f"{_NAMESPACE}::kept", "CompositeExplicitAutograd")
def _kept(
    size: Sequence[int], stride: Sequence[int], probability: float, number: int, *, device: torch.device
) -> Tensor:
    """Return a mask of ones with this probability, drawn as `torch.Tensor.bernoulli_` draws it.

    Of bytes, since what Inductor makes takes twenty times as long to read a mask of bool.
    """
    return torch.empty_strided(size, stride, dtype=torch.uint8, device=device).bernoulli_(probability)


@torch.library.register_fake(f"{_NAMESPACE}::kept")  # type: ignore[untyped-decorator]
def _kept_like(
    size: Sequence[int], stride: Sequence[int], probability: float, number: int, *, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=torch.uint8, device=device)


# --- attention ---

torch.library.define(
    f"{_NAMESPACE}::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, float scale, int number) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_DRAWS,
)
torch.library.define(
    f"{_NAMESPACE}::attention_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor probabilities, Tensor kept, "
    "float dropout_p, float scale) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl(f"{_NAMESPACE}::attention", "CPU")
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of `nano_loop.kernels.plain_attention`, and what its backward needs."""
    context = _Context()
    out = plain_attention._Attention.forward(context, query, key, value, mask, dropout_p, scale)
    *_, probabilities, kept = context.saved_tensors
    assert probabilities is not None
    return out, probabilities, probabilities.new_empty(0, dtype=torch.uint8) if kept is None else kept


@torch.library.register_fake(f"{_NAMESPACE}::attention")  # type: ignore[untyped-decorator]
def _attention_like(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.new_empty(query.shape[:-2]).numel()
    shape = (rows, query.size(-2), key.size(-2))
    kept = query.new_empty(shape if dropout_p else (0,), dtype=torch.uint8)
    return query.new_empty((*query.shape[:-1], value.size(-1))), query.new_empty(shape), kept


@torch.library.impl(f"{_NAMESPACE}::attention_backward", "CPU")
def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    probabilities: Tensor,
    kept: Tensor,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    flat = (each.reshape(-1, *each.shape[-2:]) for each in (query, key, value))
    context = _Context(
        saved_tensors=(*flat, probabilities, kept if dropout_p else None),
        shapes=(query.shape, key.shape, value.shape),
        dropout_p=dropout_p,
        scale=scale,
    )
    found: Any = plain_attention._Attention.backward(context, gradient)
    return found[0], found[1], found[2]


@torch.library.register_fake(f"{_NAMESPACE}::attention_backward")  # type: ignore[untyped-decorator]
def _attention_backward_like(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query, key, value))


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, ctx.dropout_p, ctx.scale, _ = inputs
    ctx.save_for_backward(query, key, value, *output[1:])


def _differentiate_attention(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.nano_loop.attention_backward(gradient, *ctx.saved_tensors, ctx.dropout_p, ctx.scale)
    return *found, None, None, None, None


torch.library.register_autograd(f"{_NAMESPACE}::attention", _differentiate_attention, setup_context=_save_attention)


# --- attention in blocks ---

torch.library.define(
    f"{_NAMESPACE}::blocked_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal, float scale, int number) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_DRAWS,
)
torch.library.define(
    f"{_NAMESPACE}::blocked_attention_backward",
    "(Tensor gradient, Tensor log_sums, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor kept, "
    "float dropout_p, bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl(f"{_NAMESPACE}::blocked_attention", "CPU")
def _blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    number: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of `nano_loop.kernels.blocked_attention`, and what its backward needs."""
    kept = torch.empty((*query.shape[:-1], key.size(-2)) if dropout_p else (0,), dtype=torch.uint8)
    if dropout_p:
        kept.bernoulli_(1 - dropout_p)
    mask = None if mask is None else blocked_attention.as_mask(mask, query, key)
    query, key, value = (blocked_attention.with_columns(each) for each in (query, key, value))
    drawn = kept if dropout_p else None
    return *blocked_attention.forward(query, key, value, mask, drawn, dropout_p, is_causal, scale), kept


@torch.library.register_fake(f"{_NAMESPACE}::blocked_attention")  # type: ignore[untyped-decorator]
def _blocked_attention_like(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    kept = query.new_empty((*query.shape[:-1], key.size(-2)) if dropout_p else (0,), dtype=torch.uint8)
    log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _by_rows(query, (*query.shape[:-1], value.size(-1))), log_sums, kept


@torch.library.impl(f"{_NAMESPACE}::blocked_attention_backward", "CPU")
def _blocked_attention_backward(
    gradient: Tensor,
    log_sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = None if mask is None else blocked_attention.as_mask(mask, query, key)
    gradient, query, key, value = (blocked_attention.with_columns(each) for each in (gradient, query, key, value))
    found = _by_rows(query, query.shape), _by_rows(key, key.shape), _by_rows(value, value.shape)
    blocked_attention.backward(
        gradient, log_sums, query, key, value, mask, kept if dropout_p else None, dropout_p, is_causal, scale, found
    )
    return found


@torch.library.register_fake(f"{_NAMESPACE}::blocked_attention_backward")  # type: ignore[untyped-decorator]
def _blocked_attention_backward_like(
    gradient: Tensor, log_sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    return tuple(_by_rows(each, each.shape) for each in (query, key, value))


def _by_rows(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor in which the heads of a row lie side by side."""
    batch, heads, rows, columns = shape
    return tensor.new_empty((batch, rows, heads, columns)).transpose(1, 2)


def _save_blocked_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, mask, *ctx.numbers, _ = inputs
    _, log_sums, kept = output
    ctx.mark_non_differentiable(log_sums, kept)
    ctx.save_for_backward(log_sums, query, key, value, mask, kept)


def _differentiate_blocked_attention(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.nano_loop.blocked_attention_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *found, *[None] * 5


torch.library.register_autograd(
    f"{_NAMESPACE}::blocked_attention", _differentiate_blocked_attention, setup_context=_save_blocked_attention
)


# --- cross-entropy ---

torch.library.define(
    f"{_NAMESPACE}::cross_entropy",
    "(Tensor logits, Tensor target, int ignore_index, float label_smoothing) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    f"{_NAMESPACE}::cross_entropy_backward",
    "(Tensor factors, Tensor logits, Tensor target, Tensor maxima, Tensor log_sums, int ignore_index, "
    "float label_smoothing) -> Tensor",
)


@torch.library.impl(f"{_NAMESPACE}::cross_entropy", "CPU")
def _cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row, and what the backward needs. A target that is not a class is torch's error."""
    context = _Context()
    found = losses._Losses.forward(context, logits, None, None, target, ignore_index, label_smoothing)
    if found is None:
        torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index)
        raise IndexError("a target of cross-entropy is not a class")
    _, _, maxima, log_sums = context.saved_tensors
    assert maxima is not None
    assert log_sums is not None
    return found, maxima, log_sums


@torch.library.register_fake(f"{_NAMESPACE}::cross_entropy")  # type: ignore[untyped-decorator]
def _cross_entropy_like(logits: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.size(0), dtype=torch.float32) for _ in range(3))


@torch.library.impl(f"{_NAMESPACE}::cross_entropy_backward", "CPU")
def _cross_entropy_backward(
    factors: Tensor,
    logits: Tensor,
    target: Tensor,
    maxima: Tensor,
    log_sums: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    context = _Context(
        saved_tensors=(logits, target, maxima, log_sums),
        upcast=None,
        dtype=logits.dtype,
        ignored=ignore_index,
        smoothing=label_smoothing,
    )
    with torch.no_grad():
        gradient, *_ = losses._Losses.backward(context, factors)
    assert gradient is not None
    return gradient


@torch.library.register_fake(f"{_NAMESPACE}::cross_entropy_backward")  # type: ignore[untyped-decorator]
def _cross_entropy_backward_like(factors: Tensor, logits: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(logits)


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.ignored, ctx.smoothing = inputs
    ctx.save_for_backward(logits, target, *output[1:])


def _differentiate_cross_entropy(ctx: Any, factors: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    arguments = (factors, *ctx.saved_tensors, ctx.ignored, ctx.smoothing)
    return torch.ops.nano_loop.cross_entropy_backward(*arguments), None, None, None


torch.library.register_autograd(
    f"{_NAMESPACE}::cross_entropy", _differentiate_cross_entropy, setup_context=_save_cross_entropy
)


# --- batch norm ---

torch.library.define(
    f"{_NAMESPACE}::batch_norm", "(Tensor input, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    f"{_NAMESPACE}::batch_norm_backward",
    "(Tensor gradient, Tensor input, Tensor weight, Tensor mean, Tensor inverse_std, float eps) "
    "-> (Tensor, Tensor, Tensor)",
)


@torch.library.impl(f"{_NAMESPACE}::batch_norm", "CPU")
def _batch_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what torch's kernel does for a batch in training: the output, the means, and 1 / standard deviation."""
    return torch.native_batch_norm(input, weight, bias, None, None, True, 0.0, eps)


@torch.library.register_fake(f"{_NAMESPACE}::batch_norm")  # type: ignore[untyped-decorator]
def _batch_norm_like(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


@torch.library.impl(f"{_NAMESPACE}::batch_norm_backward", "CPU")
def _batch_norm_backward(
    gradient: Tensor, input: Tensor, weight: Tensor, mean: Tensor, inverse_std: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    of_input, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, input, weight, None, None, mean, inverse_std, True, eps, [True, True, True]
    )
    return of_input, of_weight, of_bias


@torch.library.register_fake(f"{_NAMESPACE}::batch_norm_backward")  # type: ignore[untyped-decorator]
def _batch_norm_backward_like(
    gradient: Tensor, input: Tensor, weight: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


def _save_batch_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, _, ctx.eps = inputs
    ctx.save_for_backward(input, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_batch_norm(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    input, *_ = ctx.saved_tensors
    # torch's kernel takes ten times as long where the two are laid out differently.
    for layout, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if input.dim() == dimensions and input.is_contiguous(memory_format=layout):
            gradient = gradient.contiguous(memory_format=layout)
    return *torch.ops.nano_loop.batch_norm_backward(gradient, *ctx.saved_tensors, ctx.eps), None


torch.library.register_autograd(f"{_NAMESPACE}::batch_norm", _differentiate_batch_norm, setup_context=_save_batch_norm)
