"""Lookups in large fp32 tables, whose gradients are summed by rows.

See `nano_loop.kernels.embedding.row_gradient`.
"""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from nano_loop.kernels.embedding.row_gradient import KERNEL, Lookups, RowGradient, tracked
from nano_loop.kernels.memory import CONTIGUOUS, computes_now, has_tangent, is_plain
from nano_loop.kernels.override import FP32, Algorithm, Call, Override
from nano_loop.patching.calls.exports import is_exporting
from nano_loop.patching.operators.operators import Kernel
from nano_loop.patching.torch_private import BAGS_KERNEL, sums_of_bags

#: Minimum number of elements in a table. torch zero-fills a smaller one in the time of the Python overhead.
MIN_ELEMENTS = 1 << 18
_SUM = 0  # torch's enum value of the mode


def _embedding(
    kernel: Kernel, weight: Tensor, indices: Tensor, padding: int = -1, *flags: bool, **named: Any
) -> Call | None:
    if any(flags) or any(named.values()) or not _is_supported(weight, indices):
        return None
    return Call("embedding", (weight,), (indices, padding))


def _embedding_bag(
    kernel: Kernel,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    by_frequency: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    sample_weights: Tensor | None = None,
    with_last_offset: bool = False,
    padding: int = -1,
) -> Call | None:
    is_simple = not by_frequency and mode == _SUM and not sparse and sample_weights is None
    if not (is_simple and _is_supported(weight, indices)):
        return None
    arguments = (indices, offsets, by_frequency, mode, sparse, sample_weights, with_last_offset, padding)
    return Call("embedding_bag", (weight,), arguments)


def _by_rows(function: type[torch.autograd.Function], call: Call) -> Any:
    (weight,) = call.tensors
    rows = tracked(weight)
    return function.apply(rows.root(weight), rows, weight.detach(), *call.numbers)  # type: ignore[no-untyped-call]


def _is_supported(weight: Tensor, indices: Tensor) -> TypeGuard[nn.Parameter]:
    """Whether a lookup can use a row gradient: the table is a large, plain parameter, and it is computed now."""
    return bool(
        type(weight) is nn.Parameter
        and weight.numel() >= MIN_ELEMENTS
        and weight.requires_grad
        and torch.is_grad_enabled()
        and weight.dim() == 2
        and is_plain(weight, FP32, CONTIGUOUS)
        and is_plain(indices, (torch.int64, torch.int32))
        and not is_exporting()
        and computes_now()
        and not has_tangent(weight)
    )


class _Rows(torch.autograd.Function):
    """Computes ``aten::embedding``."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, rows: RowGradient, weight: Tensor, indices: Tensor, padding: int) -> Tensor:
        ctx.root, ctx.rows, ctx.padding = root, rows, padding
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return torch.ops.aten.embedding(weight, indices)  # type: ignore[no-any-return]  # no view: a program may write into it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, ...]:
        if gradient is not None:
            (indices,) = ctx.saved_tensors
            ctx.rows.add(Lookups(gradient, indices.to(torch.int64), None, ctx.padding))
        return (None,) * 5


class _Bags(torch.autograd.Function):
    """Computes ``aten::_embedding_bag`` for sums."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, rows: RowGradient, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        indices, offsets, *_, padding = arguments
        bags, *others = sums_of_bags(weight, *arguments)
        ctx.root, ctx.rows, ctx.padding = root, rows, padding
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices, offsets)
        ctx.mark_non_differentiable(*others)
        return bags, *others

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[None, ...]:
        if gradient is not None:
            indices, offsets = (tensor.to(torch.int64) for tensor in ctx.saved_tensors)
            places = torch.arange(len(indices), dtype=torch.int64, device="cpu")
            sources = torch.searchsorted(offsets, places, right=True) - 1
            ctx.rows.add(Lookups(gradient, indices, sources, ctx.padding))
        return (None,) * len(ctx.needs_input_grad)


OVERRIDES = tuple(
    Override(
        operator,
        (Algorithm("rows", functools.partial(_by_rows, function), FP32, kernel=KERNEL.name, is_raced=False),),
        supports,
        dispatch_key="AutogradCPU",
    )
    for operator, function, supports in (("embedding", _Rows, _embedding), (BAGS_KERNEL, _Bags, _embedding_bag))
)
