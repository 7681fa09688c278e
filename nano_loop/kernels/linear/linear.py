"""Matrix products and batched matrix products: ``aten::mm``, ``addmm``, ``bmm`` and ``baddbmm``.

bf16 matrices are multiplied by `nano_loop.kernels.linear.product`, and so are fp32 matrices whose products round to
bf16. Other fp32 matrices are multiplied by `nano_loop.kernels.linear.fp32_product` where it is faster.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import narrow_copies, override
from nano_loop.kernels.linear import fp32_product, product
from nano_loop.kernels.memory import is_plain
from nano_loop.kernels.narrow_weight import NarrowWeight
from nano_loop.kernels.override import BF16, COMPILED, FP32, ROUNDED, TORCH, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.patching.torch_private_autograd import current_node_number
from nano_loop.policy import product_precision
from nano_loop.policy.product_precision import PRODUCT

#: Minimum number of multiplications in a bf16 product. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 24
_MATRIX, _BATCH = 2, 3
#: Minimum number of rows in a measured product.
_MIN_ROWS = 64
#: The name of the algorithm for bf16 matrices.
BLOCKS = "blocks"


def _supports(
    dimensions: int, kernel: Kernel, *args: Tensor, beta: float = 1, alpha: float = 1, **named: Any
) -> Call | None:
    """Return alpha a b + beta bias for matrices or equally many batches of them, if it is large enough."""
    *added, a, b = args
    is_fp32 = torch.float32 in (a.dtype, b.dtype)  # one may be a bf16 copy
    if (not is_fp32 and a.dtype is not torch.bfloat16) or a.dim() != dimensions or b.dim() != dimensions:
        return None
    multiplications = a.numel() * b.size(-1)
    fewest = MIN_MULTIPLICATIONS
    if is_fp32:
        fewest = min(fp32_product.MIN_MULTIPLICATIONS, product_precision.MIN_MULTIPLICATIONS[PRODUCT])
    if multiplications < fewest:
        return None
    scales = () if alpha == beta == 1 else (beta, alpha)
    bias = added[0] if added else None
    return Call(PRODUCT, (a, b, bias), scales, kernel, multiplications, named, timed=_timed)


def _timed(call: Call) -> Call | None:
    """Return a product of some of the rows, because the output of a vocabulary layer needs a lot of memory."""
    a, b, bias = call.tensors
    if a.dim() == _MATRIX and (bias is None or bias.dim() <= 1):
        a = a[: max(override.MOST_ELEMENTS // max(b.size(-1), 1), _MIN_ROWS)]
    call = call._replace(tensors=(a, b, bias))
    if "out" in call.details:
        call = call._replace(details={"out": a.new_empty(_shape(call))})
    return call if call.numbers_in != ROUNDED or call.is_measurable else None


def _by_torch(call: Call) -> Any:
    a, b, bias = *override.in_fp32(call.tensors[:2]), call.tensors[2]
    named = dict(zip(("beta", "alpha"), call.numbers, strict=False)) | call.details
    assert call.kernel is not None
    return call.kernel(*(() if bias is None else (bias,)), a, b, **named)


def _in_blocks(call: Call) -> Tensor:
    a, b, bias = call.tensors
    return product.product(a, b, bias, call.details.get("out"))


def _in_fp32(call: Call) -> Tensor:
    return fp32_product.product(*call.tensors)


def _rounded(call: Call) -> Tensor:
    """Return the product of factors in bf16, with an fp32 sum added."""
    (a, b, bias), (beta, alpha) = call.tensors, call.numbers or (1, 1)
    a = narrow_copies.rounded_once(a)
    row = bias if _adds_row(call) else None
    result = product.product(a, b, row, call.details.get("out"), dtype=torch.float32)
    if alpha != 1:
        result.mul_(alpha)
    if bias is not None and row is None and beta != 0:
        result.add_(bias, alpha=beta)
    return result


def _supports_blocks(call: Call) -> bool:
    return call.tensors[0].dim() == _MATRIX and (call.tensors[2] is None or _adds_row(call)) and _can_pack(call)


def _supports_rounding(call: Call) -> bool:
    bias = call.tensors[2]
    return (bias is None or _adds_row(call) or _is_expandable(bias, _shape(call))) and _can_pack(call)


def _supports_fp32(call: Call) -> bool:
    """Whether the sizes are those of a product plus a bias per column. torch raises for others, or broadcasts."""
    (a, b, bias), is_simple = call.tensors, not call.numbers and not call.details
    if not is_simple or a.dim() != _MATRIX or a.size(1) != b.size(0) or a.dtype is not b.dtype:
        return False
    if call.multiplications < fp32_product.MIN_MULTIPLICATIONS:
        return False
    return bias is None or bias.shape == b.shape[1:]


def _can_pack(call: Call) -> bool:
    """Whether `product.product` supports the factors and the sum, which must be plain tensors."""
    (a, b, bias), out = call.tensors, call.details.get("out")
    dtypes = (a.dtype,), (a.dtype, torch.bfloat16), (a.dtype,)  # a frozen weight may have no fp32 values
    pairs = zip(call.tensors, dtypes, strict=True)
    if not all(is_plain(tensor, allowed) for tensor, allowed in pairs if tensor is not None):
        return False
    if a.size(-1) != b.size(-2) or a.shape[:-2] != b.shape[:-2]:
        return False
    if out is not None and not product.can_be_filled(out, _shape(call), a.dtype, (a, b, bias)):
        return False
    return product.supports(a, b)


def _adds_row(call: Call) -> bool:
    """Whether the bias is added to each row and nothing else changes the product."""
    bias = call.tensors[2]
    return not call.numbers and bias is not None and bias.shape == _shape(call)[-1:] and bias.stride() == (1,)


def _shape(call: Call) -> torch.Size:
    """Return the shape of the result."""
    a, b, _ = call.tensors
    return torch.Size((*a.shape[:-1], b.size(-1)))


def _is_expandable(bias: Tensor, shape: torch.Size) -> bool:
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    return bias.dim() <= len(shape) and all(size in (1, of) for size, of in sizes)


def _reads_copy(call: Call) -> bool:
    """Whether this is a product of a backward, and one factor is a bf16 copy of an fp32 tensor."""
    a, b, bias = call.tensors
    dtypes = (*BF16, *FP32)
    if a.dtype is b.dtype or bias is not None or call.details or current_node_number() is None:
        return False
    return is_plain(a, dtypes) and is_plain(b, dtypes) and a.size(1) == b.size(0) and product.supports(a, b)


def _default(call: Call) -> str:
    return BLOCKS if call.tensors[0].dtype is torch.bfloat16 and product.KERNEL.unavailable is None else TORCH


_ALGORITHMS = (
    Algorithm("mixed", _rounded, FP32, is_exact=False, supports=_reads_copy, is_raced=False),
    Algorithm(BLOCKS, _in_blocks, BF16, supports=_supports_blocks),
    Algorithm(ROUNDED, _rounded, FP32, is_exact=False, supports=_supports_rounding),
    Algorithm(COMPILED, _in_fp32, FP32, supports=_supports_fp32, kernel=fp32_product.KERNEL.name),
)
#: For matrices and batches. Inductor calls the overloads with ``out``.
MATRICES, BATCHES = (
    tuple(
        Override(
            f"{name}{overload}",
            _ALGORITHMS,
            partial(_supports, dimensions),
            _default,
            _by_torch,
            product=PRODUCT,
            factors=2,
            packs=True,
            reads_copies=name == "mm" and not overload,
        )
        for name in names
        for overload in ("", ".out")
    )
    for dimensions, names in ((_MATRIX, ("mm", "addmm")), (_BATCH, ("bmm", "baddbmm")))
)
OVERRIDES = (*MATRICES, *BATCHES)
#: Products that keep a factor in bf16. Their backward calls ``mm``.
WITH_COPIES = (
    narrow_copies.keeping("mm", {0: "self"}, "mm", only_for=1),
    narrow_copies.keeping("addmm", {1: "mat1"}, "mm", only_for=2),
)
NarrowWeight.products = {replaced.operator: replaced for replaced in MATRICES}
