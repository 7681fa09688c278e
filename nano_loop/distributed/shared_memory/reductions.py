"""Reductions of tensors over ranks in rank order, so that each rank computes bitwise identical results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from nano_loop.distributed.comm.averaging_math import divide
from nano_loop.errors import NanoError, error_message

#: Combines the result of the previous ranks with the next rank's tensor, in place of the former.
Combine = Callable[[torch.Tensor, torch.Tensor], object]


_COMBINE: dict[str, Combine] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda total, other: torch.minimum(total, other, out=total),
    "MAX": lambda total, other: torch.maximum(total, other, out=total),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


def name_of(operation: Any) -> str:
    """Return the name of a torch reduction; raise a NanoError if ranks of one host cannot compute it."""
    for name in _COMBINE:
        if operation == getattr(ReduceOp, name):
            return name
    expected = f"processes on one host can compute {', '.join(_COMBINE)}"
    raise NanoError(error_message(f"{operation}", expected, "Use one of these"))


def reduced(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the reduction of all ranks' tensors, in the memory of the first."""
    total, *others = parts
    for other in others:
        _COMBINE[name](total, other)
    if name == "AVG" and (total.is_floating_point() or total.is_complex()):
        divide(total, len(parts))
    elif name == "AVG":
        total.div_(len(parts), rounding_mode="trunc")
    return total
