"""Reductions of tensors of several ranks, one rank after the other, so that each rank computes the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.distributed import ReduceOp

from nano_loop.distributed.comm.averaging_math import divide
from nano_loop.errors import NanoError, error_message

#: Is given what the ranks before have made, and the next rank's; changes the former.
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


class Reduction:
    """One of torch's reductions, for tensors of one dtype.

    Parameters
    ----------
    operation : torch.distributed.ReduceOp
        Which.
    dtype : torch.dtype
        Of the tensors.

    Raises
    ------
    NanoError
        If there is no such reduction for this dtype.
    """

    def __init__(self, operation: Any, dtype: torch.dtype) -> None:
        self.name = _name_of(operation)
        self.combine = _COMBINE[self.name]
        if not _computes(self.name, dtype):
            got = f"ReduceOp.{self.name} of {dtype}"
            hint = "Convert the tensor to another dtype, such as float32 or int64, and reduce that"
            raise NanoError(error_message(got, "torch cannot compute it on the CPU", hint))

    def finish(self, total: torch.Tensor, count: int) -> None:
        """Do what is left to do when the tensors of all `count` ranks have been combined."""
        if self.name == "AVG":
            _divide(total, count)


def _divide(total: torch.Tensor, count: int) -> None:
    if total.is_floating_point() or total.is_complex():
        divide(total, count)
    else:
        total.div_(count, rounding_mode="trunc")


def _name_of(operation: Any) -> str:
    for name in _COMBINE:
        if operation == getattr(ReduceOp, name):
            return name
    expected = f"processes of one host can compute {', '.join(_COMBINE)}"
    raise NanoError(error_message(f"{operation}", expected, "Use one of these"))


@lru_cache(maxsize=256)
def _computes(name: str, dtype: torch.dtype) -> bool:
    try:
        total = torch.ones(2, dtype=torch.uint8, device="cpu").to(dtype)
        _COMBINE[name](total, total.clone())
        if name == "AVG":
            _divide(total, 2)
    except (RuntimeError, TypeError):  # torch has both for dtypes that a function does not know
        return False
    return True
