"""What kernels ask about products of fp32 tensors: whether one rounds its inputs, to bf16 or to fp16's numbers.

Sums and results are in fp32, so nothing but the product itself knows of bf16 or fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from nano_loop.patching.ownership import rule_for
from nano_loop.policy.policy import RULE, Policy, is_large

#: The name of the rule that chooses an algorithm, which is no operator's, and the algorithms.
ALGORITHM = "rounding of products"
FP32, ROUNDED = "fp32", "rounded"


def _policy() -> Policy | None:
    """Return the policy of the model for which torch computes now. None: all its products are in fp32."""
    return cast("Policy | None", rule_for(RULE))


def dtype_of(kind: str, multiplications: int) -> torch.dtype:
    """Return the dtype to whose numbers a product of fp32 tensors may round its inputs: float32 where it may not.

    It may where it is large enough, and torch computes for a model whose products round.
    """
    policy = _policy()
    return policy.dtype if policy is not None and policy.may_round(kind, multiplications) else torch.float32


def rounds(
    kind: str,
    multiplications: int,
    call: tuple[Any, ...],
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
    call : tuple
        The arguments by which it is known: `nano_loop.kernels.replacement.Arguments`.
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
