"""Products of fp32 matrices that round their inputs: to bf16, by `nano_loop.kernels.linear.product`, or to fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.linear import product
from nano_loop.kernels.replacement import Replacement, unless_none
from nano_loop.policy.policy import PRODUCT
from nano_loop.policy.products import Arguments, dtype_of, in_fp16, rounds

_MATRIX, _BATCH = 2, 3
_KNOWN = frozenset(("beta", "alpha", "out"))


def rounded_product(
    by_torch: Callable[..., Any],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    dimensions: int = _MATRIX,
    **kwargs: Any,
) -> Tensor | None:
    """Compute alpha a b + beta bias in fp32, from a and b rounded, or return None where torch has to compute.

    Parameters
    ----------
    by_torch : callable
        torch's kernel. Takes a, b, the bias or None, and the keyword arguments.
    a, b : torch.Tensor
        Two matrices, or two batches of as many.
    bias : torch.Tensor, optional
        Of the result's shape, or one that is expanded to it.
    dimensions : int
        How many the operator takes: two of matrices, three of batches.
    **kwargs
        Those of the operator: the factors ``beta`` and ``alpha``, and ``out``.
    """
    multiplications = multiplications_of(a, b)
    factors = in_fp16(PRODUCT, multiplications, a, b)
    if factors is not None:
        result: Tensor = by_torch(*factors, bias, **kwargs)
        return result
    if dtype_of(PRODUCT, multiplications) is not torch.bfloat16:
        return None
    if kwargs.keys() - _KNOWN or not _supports(a, b, dimensions):
        return None
    beta, alpha, out = kwargs.get("beta", 1), kwargs.get("alpha", 1), kwargs.get("out")
    shape = torch.Size((*a.shape[:-1], b.size(-1)))
    if out is not None and not product.can_be_filled(out, shape, torch.float32, (a, b, bias)):
        return None
    is_row = bias is not None and beta == alpha == 1 and _is_row(bias, shape)
    if bias is not None and not is_row and not _is_expandable(bias, shape):
        return None

    def rounded(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        row = bias if is_row else None
        result = product.product(a, b, row, out, torch.float32)
        if alpha != 1:
            result.mul_(alpha)
        if bias is not None and row is None and beta != 0:
            result.add_(bias, alpha=beta)
        return result

    def in_fp32(a: Tensor, b: Tensor, bias: Tensor | None) -> Any:
        of_its_own = {} if out is None else {"out": a.new_empty((*a.shape[:-1], b.size(-1)))}
        return by_torch(a, b, bias, **{**kwargs, **of_its_own})

    call = Arguments(PRODUCT, (a, b, bias), () if alpha == beta == 1 else (beta, alpha))
    is_rounded = rounds(PRODUCT, multiplications, call, in_fp32, rounded, packed=a.numel() + b.numel())
    return rounded(a, b, bias, out) if is_rounded else None


def multiplications_of(a: Tensor, b: Tensor) -> int:
    """Return the number of multiplications of a product, whatever its factors are: torch raises for wrong ones."""
    return a.numel() * (b.size(-1) if b.dim() else 0)


def factors_first(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's kernel of a product as a function of a, b, and what is added or None."""

    def by_torch(a: Tensor, b: Tensor, bias: Tensor | None, **kwargs: Any) -> Any:
        return kernel(a, b, **kwargs) if bias is None else kernel(bias, a, b, **kwargs)

    return by_torch


def _bmm(kernel: Callable[..., Any], a: Tensor, b: Tensor, **kwargs: Any) -> Tensor | None:
    return rounded_product(factors_first(kernel), a, b, None, _BATCH, **kwargs)


def _baddbmm(kernel: Callable[..., Any], bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor | None:
    return rounded_product(factors_first(kernel), a, b, bias, _BATCH, **kwargs)


#: `nano_loop.kernels.linear.linear` replaces the kernels of ``mm`` and ``addmm``. Inductor calls those with ``out``.
REPLACEMENTS = tuple(
    Replacement(f"{name}{overload}", unless_none(function))
    for name, function in (("bmm", _bmm), ("baddbmm", _baddbmm))
    for overload in ("", ".out")
)


def _supports(a: Tensor, b: Tensor, dimensions: int) -> bool:
    if not (_is_plain(a) and _is_plain(b)) or a.dim() != dimensions or b.dim() != dimensions:
        return False
    return a.size(-1) == b.size(-2) and a.shape[:-2] == b.shape[:-2] and product.supports(a, b)


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _is_row(bias: Tensor, shape: torch.Size) -> bool:
    return _is_plain(bias) and bias.shape == shape[-1:] and bias.stride() == (1,) and bias.data_ptr() != 0


def _is_expandable(bias: Tensor, shape: torch.Size) -> bool:
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    return _is_plain(bias) and bias.dim() <= len(shape) and all(size in (1, of) for size, of in sizes)
