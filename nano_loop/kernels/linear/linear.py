"""Products of matrices and of batches of them: ``aten::mm``, ``addmm``, ``bmm`` and ``baddbmm``.

Matrices of bf16 are multiplied by `nano_loop.kernels.linear.product`, and so are those of fp32 that round their inputs
to bf16. Other matrices of fp32 are multiplied by `nano_loop.kernels.linear.fp32_product`, where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.fp16 import in_fp16
from nano_loop.kernels.linear import fp32_product, product
from nano_loop.kernels.memory import attempt, is_plain
from nano_loop.kernels.replacement import Arguments, Choose, Replacement
from nano_loop.patching.operators.operators import Kernel
from nano_loop.patching.ownership import belongs_to_set_up_model, rule_for
from nano_loop.policy.policy import PRODUCT
from nano_loop.policy.products import dtype_of, rounds

#: Minimum number of multiplications of bf16 matrices. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 24
_MATRIX, _BATCH = 2, 3

#: The name of the rule that chooses an algorithm, which is no operator's, and the algorithms.
ALGORITHM = "algorithm of products"
TORCH, BLOCKS = "torch", "blocks"


class _Product(NamedTuple):
    """alpha a b + beta bias, of matrices or of batches of as many."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    out: Tensor | None = None
    beta: float = 1
    alpha: float = 1

    @property
    def shape(self) -> torch.Size:
        """That of the result."""
        return torch.Size((*self.a.shape[:-1], self.b.size(-1)))

    @property
    def adds_row(self) -> bool:
        """Whether the bias is added to each row, and nothing else changes the product."""
        bias = self.bias
        is_row = bias is not None and bias.shape == self.shape[-1:] and bias.stride() == (1,)
        return is_row and self.beta == self.alpha == 1

    def supports(self, dtype: torch.dtype, dimensions: int) -> bool:
        """Whether `product.product` multiplies plain factors of this dtype, and what is added is plain, too."""
        a, b, bias, out, *_ = self
        if a.dim() != dimensions or b.dim() != dimensions:
            return False
        if not all(is_plain(tensor, (dtype,)) for tensor in (a, b, bias) if tensor is not None):
            return False
        if a.size(-1) != b.size(-2) or a.shape[:-2] != b.shape[:-2]:
            return False
        if out is not None and not product.can_be_filled(out, self.shape, dtype, (a, b, bias)):
            return False
        return product.supports(a, b)


def _replacing(dimensions: int) -> Callable[[Kernel | None], Callable[..., Any]]:
    """Return the `make` of an operator's replacement. Calls outside of set-up models are torch's."""

    def make(original: Kernel | None) -> Callable[..., Any]:
        assert original is not None

        def dispatched(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            *_, a, b = args
            if not _is_small(a, b):
                result = attempt(_computed, partial(original, keys), dimensions, *args, **kwargs)
                if result is not None:
                    return result
            return original(keys, *args, **kwargs)

        return dispatched

    return make


#: Of matrices and of batches. Inductor calls those with ``out``.
MATRICES, BATCHES = (
    tuple(Replacement(f"{name}{overload}", _replacing(dimensions)) for name in names for overload in ("", ".out"))
    for dimensions, names in ((_MATRIX, ("mm", "addmm")), (_BATCH, ("bmm", "baddbmm")))
)
REPLACEMENTS = (*MATRICES, *BATCHES)


def _multiplications(a: Tensor, b: Tensor) -> int:
    """Return the number of multiplications of a product, whatever its factors are: torch raises for wrong ones."""
    return a.numel() * (b.size(-1) if b.dim() else 0)


def _is_small(a: Tensor, b: Tensor) -> bool:
    """Whether a product is too small for any function, which is asked first, since it costs the least."""
    multiplications = _multiplications(a, b)
    if a.dtype is torch.float32:
        is_small = multiplications < fp32_product.MIN_MULTIPLICATIONS
        return is_small and dtype_of(PRODUCT, multiplications) is torch.float32
    return a.dtype is not torch.bfloat16 or multiplications < MIN_MULTIPLICATIONS


def _computed(kernel: Callable[..., Any], dimensions: int, *args: Any, **kwargs: Any) -> Any:
    """Return the result, or None where torch has to compute."""
    *added, a, b = args
    call = _Product(a, b, *added, **kwargs)

    def by_torch(a: Tensor, b: Tensor, bias: Tensor | None) -> Any:
        of_its_own = {} if call.out is None else {"out": a.new_empty((*a.shape[:-1], b.size(-1)))}
        return kernel(*(() if bias is None else (bias,)), a, b, **{**kwargs, **of_its_own})

    if a.dtype is torch.bfloat16:
        return _in_bf16(call, by_torch) if dimensions == _MATRIX else None
    multiplications = _multiplications(a, b)
    factors = in_fp16(PRODUCT, multiplications, a, b)
    if factors is not None:
        return kernel(*added, *factors, **kwargs)
    if dtype_of(PRODUCT, multiplications) is torch.bfloat16 and call.supports(torch.float32, dimensions):
        rounded = _rounded(call, by_torch, multiplications)
        if rounded is not None:
            return rounded
    is_simple = dimensions == _MATRIX and not kwargs
    return fp32_product.product_if_faster(by_torch, a, b, call.bias) if is_simple else None


def _in_bf16(call: _Product, by_torch: Callable[..., Any]) -> Tensor | None:
    """Return the product of bf16 matrices in blocks, or None where torch has to compute."""
    adds_other = call.bias is not None and not call.adds_row
    if not belongs_to_set_up_model() or adds_other or not call.supports(torch.bfloat16, _MATRIX):
        return None
    guess = BLOCKS if product.KERNEL.is_first_guess else TORCH
    rule: Choose | None = rule_for(ALGORITHM)
    key = Arguments("product", call[:3])
    choice = guess if rule is None else rule(key, lambda: {TORCH: by_torch, BLOCKS: product.product}, guess)
    return product.product(*call[:4]) if choice == BLOCKS else None


def _rounded(call: _Product, by_torch: Callable[..., Any], multiplications: int) -> Tensor | None:
    """Return the product of factors in bf16, to which fp32 is added, or None where it is faster in fp32."""
    beta, alpha, adds_row = call.beta, call.alpha, call.adds_row
    if call.bias is not None and not adds_row and not _is_expandable(call.bias, call.shape):
        return None

    def rounded(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        row = bias if adds_row else None
        result = product.product(a, b, row, out, torch.float32)
        if alpha != 1:
            result.mul_(alpha)
        if bias is not None and row is None and beta != 0:
            result.add_(bias, alpha=beta)
        return result

    key = Arguments(PRODUCT, call[:3], () if alpha == beta == 1 else (beta, alpha))
    packed = call.a.numel() + call.b.numel()
    return rounded(*call[:4]) if rounds(PRODUCT, multiplications, key, by_torch, rounded, packed) else None


def _is_expandable(bias: Tensor, shape: torch.Size) -> bool:
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    return bias.dim() <= len(shape) and all(size in (1, of) for size, of in sizes)
