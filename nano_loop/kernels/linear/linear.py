"""Linear layers and their gradients: ``aten::mm`` and ``aten::addmm`` by `nano_loop.kernels.linear.product`.

Matrices are of bf16, or of fp32: see `nano_loop.kernels.linear.rounded_product` and
`nano_loop.kernels.linear.fp32_product`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.linear import fp32_product, product, rounded_product
from nano_loop.kernels.memory import attempt
from nano_loop.kernels.replacement import Choose, Replacement
from nano_loop.patching.ownership import belongs_to_set_up_model, rule_for
from nano_loop.policy.policy import PRODUCT
from nano_loop.policy.products import dtype_of

#: Minimum number of multiplications. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 24
_DIMENSIONS = 2

#: The name of the rule that chooses an algorithm, which is no operator's, and the algorithms.
ALGORITHM = "algorithm of products"
TORCH, BLOCKS = "torch", "blocks"

_Kernel = Callable[..., Any]


class Arguments(NamedTuple):
    """The factors of a product, and what is added: a vector for each row, or None."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None


def mm(original: _Kernel | None) -> _Kernel:
    """Return the replacement of the CPU kernel of ``aten::mm``. Calls outside of set-up models are torch's."""
    assert original is not None

    def dispatched(keys: torch.DispatchKeySet, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
        if _is_small(a, b):
            return original(keys, a, b, **kwargs)
        return _computed(Arguments(a, b), partial(original, keys), kwargs)

    return dispatched


def addmm(original: _Kernel | None) -> _Kernel:
    """Return the replacement of the CPU kernel of ``aten::addmm``; see `mm`."""
    assert original is not None

    def dispatched(keys: torch.DispatchKeySet, bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
        if _is_small(a, b):
            return original(keys, bias, a, b, **kwargs)
        return _computed(Arguments(a, b, bias), partial(original, keys), kwargs)

    return dispatched


#: Inductor calls those with ``out``.
REPLACEMENTS = tuple(
    Replacement(f"{make.__name__}{overload}", make) for make in (mm, addmm) for overload in ("", ".out")
)


def supports(call: Arguments) -> bool:
    """Whether `nano_loop.kernels.linear.product` computes a call: plain bf16 matrices, and a bias for each column."""
    a, b, bias = call
    tensors = (a, b) if bias is None else (a, b, bias)
    if any(tensor.dtype is not torch.bfloat16 for tensor in tensors) or a.dim() != _DIMENSIONS:
        return False
    if any(
        type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided for tensor in tensors
    ):
        return False
    if a.size(1) != b.size(0) or (bias is not None and bias.shape != b.shape[1:]):
        return False
    return product.supports(a, b, bias)


def _is_small(a: Tensor, b: Tensor) -> bool:
    """Whether a product is in fp32 and too small for any function, which is asked first, since it costs the least."""
    if a.dtype is not torch.float32:
        return False
    multiplications = rounded_product.multiplications_of(a, b)
    is_small = multiplications < fp32_product.MIN_MULTIPLICATIONS
    return is_small and dtype_of(PRODUCT, multiplications) is torch.float32


def _computed(call: Arguments, kernel: _Kernel, kwargs: dict[str, Any]) -> Any:
    result, by_torch = None, rounded_product.factors_first(kernel)
    if call.a.dtype is torch.float32:
        result = attempt(rounded_product.rounded_product, by_torch, *call, **kwargs)
        if result is None and not kwargs:
            result = attempt(fp32_product.product_if_faster, by_torch, *call)
    elif _is_ours(call, **kwargs) and _algorithm(call, by_torch, "out" in kwargs) == BLOCKS:
        result = attempt(product.product, *call, kwargs.get("out"))
    return by_torch(*call, **kwargs) if result is None else result


def _is_ours(call: Arguments, out: Tensor | None = None, beta: float = 1, alpha: float = 1) -> bool:
    """Whether a call may be computed in blocks. What is asked first costs the least: many calls are small."""
    a, b, _ = call
    if a.dtype is not torch.bfloat16 or b.dim() != _DIMENSIONS or a.numel() * b.size(1) < MIN_MULTIPLICATIONS:
        return False
    if not belongs_to_set_up_model():
        return False
    if out is not None and not product.can_be_filled(out, torch.Size((a.size(0), b.size(1))), a.dtype, call):
        return False
    return beta == alpha == 1 and supports(call)


def _algorithm(call: Arguments, by_torch: _Kernel, needs_out: bool) -> str:
    guess = BLOCKS if product.KERNEL.is_first_guess else TORCH
    rule: Choose | None = rule_for(ALGORITHM)
    if rule is None:
        return guess

    def torchs(a: Tensor, b: Tensor, bias: Tensor | None) -> Any:
        return by_torch(a, b, bias, **({"out": a.new_empty(a.size(0), b.size(1))} if needs_out else {}))

    return rule(call, lambda: {TORCH: torchs, BLOCKS: product.product}, guess)
