"""Replaces functions of torch by nano_loop's operators in a graph that `torch.compile` has traced.

Inductor offers such a pass over the graph of Dynamo, in which `torch.nn.functional.batch_norm` and others are whole.
The functions here are traced in their place, with the shapes and under the autocast of the call. Each calls torch's
function where nano_loop's operator does not support the call.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from nano_loop.compile import operators
from nano_loop.kernels.attention import attention as attentions
from nano_loop.kernels.attention import blocked_attention, plain_attention
from nano_loop.kernels.loss import cross_entropy as losses
from nano_loop.patching.torch_private import in_functorch
from nano_loop.patching.torch_private_compiler import graph_pass

ATTENTION, BATCH_NORM, CROSS_ENTROPY, DROPOUT, RELU = "attention", "batch_norm", "cross_entropy", "dropout", "relu"
#: The files on which traced graphs depend.
_SOURCES = [Path(str(module.__file__)) for module in (operators, attentions, plain_attention)] + [Path(__file__)]


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`."""
    if not torch.is_autocast_enabled("cpu"):
        return F.scaled_dot_product_attention(*args, **kwargs)
    return attentions.attention(*args, **kwargs, traced_as=_attention)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    even = query.size(-1) % 2 == 0 and value.size(-1) % 2 == 0
    if query.dim() != 4 or not even or blocked_attention.KERNEL.unavailable:
        return plain_attention.plain_attention(query, key, value, mask, dropout_p, is_causal, scale)
    kept = blocked_attention.drawn(query, key, dropout_p)
    out: Tensor
    out, _ = operators.blocked_attention(query, key, value, mask, kept, dropout_p, is_causal, scale)
    return out


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, number: int) -> Tensor:
    """Compute `torch.nn.functional.dropout`, whose mask alone is an operator; `number` is that of the call."""
    if p == 1 and training:  # draws nothing
        return input.mul_(0) if inplace else input * 0
    if not training or not 0 < p < 1 or input.device.type != "cpu":
        return F.dropout(input, p, training, inplace)
    like = torch.empty_like(input)
    mask: Tensor = operators.kept(like.shape, like.stride(), 1 - p, number, device=torch.device("cpu"))
    noise = mask.to(input.dtype) / (1 - p)
    return input.mul_(noise) if inplace else input * noise


class _Relu(torch.autograd.Function):
    """A ReLU that keeps a mask of bytes. torch's has one of bool, which takes Inductor's code twenty times as long."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        out = torch.relu(input)
        ctx.save_for_backward(out.sign().to(torch.uint8))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        masked: Tensor = gradient * positive.to(gradient.dtype)
        return masked


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """Compute `torch.nn.functional.relu`."""
    if not input.is_floating_point():
        return F.relu(input, inplace)
    out: Tensor = _Relu.apply(input)  # type: ignore[no-untyped-call]
    return input.copy_(out) if inplace else out  # torch's tracing leaves no copy


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy`, of logits in bf16 or fp32."""
    usual = weight is None and size_average is None and reduce is None and reduction in ("none", "mean", "sum")
    is_ours = usual and input.dim() == 2 and losses.supports(input, target) and input.numel() >= losses.MIN_LOGITS
    if not is_ours or not 0 <= label_smoothing <= 1 or losses.KERNEL.unavailable:
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    row_losses: Tensor = operators.cross_entropy(input, target, ignore_index, label_smoothing)[0]
    if reduction == "none":
        return row_losses
    return row_losses.sum() if reduction == "sum" else row_losses.sum() / target.ne(ignore_index).sum()


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `torch.nn.functional.batch_norm`, in training by torch's kernel: Inductor's takes three times as long."""
    count = input.numel() // max(input.size(1), 1)
    dtypes = input.dtype in (torch.float32, torch.bfloat16) and input.device.type == "cpu"
    parameters = [
        parameter for parameter in (weight, bias) if parameter is not None and parameter.dtype is torch.float32
    ]
    if not training or not dtypes or len(parameters) < 2 or count < 2:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    out, mean, inverse_std = operators.batch_norm(input, *parameters, eps)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = (inverse_std.pow(-2) - eps) * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    computed: Tensor = out
    return computed


_FUNCTIONS: Mapping[str, Mapping[Callable[..., Any], Callable[..., Tensor]]] = {
    ATTENTION: {F.scaled_dot_product_attention: attention},
    BATCH_NORM: {F.batch_norm: batch_norm},
    DROPOUT: {F.dropout: dropout},
    RELU: {F.relu: relu, torch.relu: relu},
    CROSS_ENTROPY: {F.cross_entropy: cross_entropy},
}


def keeping(names: Collection[str]) -> Any:
    """Return the pass for Inductor's option ``pre_grad_custom_pass`` that keeps these operators whole.

    Parameters
    ----------
    names : collection of str
        Of `ATTENTION`, `BATCH_NORM`, `CROSS_ENTROPY`, `DROPOUT` and `RELU`.
    """
    functions = {
        original: _replacement(original, ours) for name in names for original, ours in _FUNCTIONS[name].items()
    }
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()

    def identity() -> object:
        """Return what the graphs in Inductor's cache depend on, besides what torch looks at."""
        return digest, *sorted(names), torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))

    return graph_pass(lambda graph: _replace(graph, functions), identity)


def _replacement(original: Callable[..., Tensor], ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes ours, except in `torch.func`, which has to see torch's."""

    @functools.wraps(ours)
    def call(*args: Any, number: int, **kwargs: Any) -> Tensor:
        if in_functorch():
            return original(*args, **kwargs)
        return ours(*args, **kwargs, number=number) if ours is dropout else ours(*args, **kwargs)

    return call


def _replace(graph: fx.Graph, functions: Mapping[Callable[..., Any], Callable[..., Tensor]]) -> None:
    for number, node in enumerate(graph.nodes):
        if node.op == "call_function" and node.target in functions:
            node.target = functions[node.target]
            node.kwargs = {**node.kwargs, "number": number}
