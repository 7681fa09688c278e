"""What kernels ask about products of fp32 tensors: whether one rounds its inputs, to bf16 or to fp16's numbers.

Sums and results are in fp32, so nothing but the product itself knows of bf16 or fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.patching.ownership import rule_for
from nano_loop.policy.policy import RULE, Policy, is_large

#: The name of the rule that chooses an algorithm, which is no operator's, and the algorithms.
ALGORITHM = "rounding of products"
FP32, ROUNDED = "fp32", "rounded"
#: The largest exponent of a factor that is no denormal number in fp32, and neither is one divided by it.
_MOST = 126


class Arguments(NamedTuple):
    """The arguments of a product, which are the key of its measured times.

    Attributes
    ----------
    kind : str
        A key of `MIN_MULTIPLICATIONS`, or another word for a gradient.
    tensors : tuple of torch.Tensor or None
        What the algorithms take.
    numbers : tuple
        What else the time depends on.
    """

    kind: str
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[Any, ...] = ()


def _policy() -> Policy | None:
    """Return the policy of the model for which torch computes now. None: all its products are in fp32."""
    policy: Any = rule_for(RULE)
    return policy


def dtype_of(kind: str, multiplications: int) -> torch.dtype:
    """Return the dtype to whose numbers a product of fp32 tensors may round its inputs: float32 where it may not.

    It may where it is large enough, and torch computes for a model whose products round.
    """
    policy = _policy()
    return policy.dtype if policy is not None and policy.may_round(kind, multiplications) else torch.float32


def rounds(
    kind: str,
    multiplications: int,
    call: Arguments,
    in_fp32: Callable[..., Any],
    rounded: Callable[..., Any],
    packed: int = 0,
) -> bool:
    """Decide whether a product rounds to bf16 that may do so, and note it for the policy.

    Parameters
    ----------
    kind : str
        A key of `MIN_MULTIPLICATIONS`.
    multiplications : int
        Their number.
    call : Arguments
        By which it is known.
    in_fp32, rounded : callable
        The algorithms. They take the tensors of `call`.
    packed : int
        How many numbers the product packs in bf16 without a cast.
    """
    algorithm = ROUNDED if is_large(kind, multiplications) else FP32
    choose: Callable[[Any, Callable[[], Mapping[str, Callable[..., Any]]], str], str] | None = rule_for(ALGORITHM)
    if choose is not None:
        algorithm = choose(call, lambda: {FP32: in_fp32, ROUNDED: rounded}, algorithm)
    if algorithm == ROUNDED:
        note(kind, multiplications, packed)
    return algorithm == ROUNDED


def note(kind: str, multiplications: int, packed: int = 0) -> None:
    """Tell the policy of a product that rounds its inputs."""
    policy = _policy()
    if policy is not None:
        policy.note(kind, multiplications, packed)


def in_fp16(kind: str, multiplications: int, *tensors: Tensor) -> list[Tensor] | None:
    """Return the inputs of a product that rounds them to fp16's numbers, and note it for the policy; None for others.

    The product itself is in fp32, so no sum overflows that does not in fp32.
    """
    if dtype_of(kind, multiplications) is not torch.float16 or not all(map(_is_plain, tensors)):
        return None
    note(kind, multiplications)
    return [_to_fp16s_numbers(tensor) for tensor in tensors]


def _is_plain(tensor: Tensor) -> bool:
    is_strided = tensor.dtype is torch.float32 and tensor.layout is torch.strided
    return is_strided and type(tensor) in (Tensor, torch.nn.Parameter) and not (tensor.is_conj() or tensor.is_neg())


def _to_fp16s_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 whose numbers are those of fp16, times the power of two of the largest finite one.

    So none overflows, and small gradients are not zero: those are that are 2⁻²⁵ of the largest, or less.
    """
    largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if tensor.numel() else 0.0
    exponent = math.frexp(largest)[1] - 1 if largest else 0
    factor = 2.0 ** min(max(exponent, -_MOST), _MOST)
    return tensor.mul(1 / factor).half().float().mul_(factor)
