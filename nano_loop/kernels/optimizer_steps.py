"""The functions of ``optimizers.c``, which step parameters, and what they take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import DENSE, INT64, Pointer, UnsupportedTensorError, check

_FP32 = Pointer((torch.float32,), DENSE)
_TENSORS = 5  # of a parameter: itself, its gradient, and up to three states

#: Each function takes rows of `addresses_of`, and the numbers of a step.
KERNEL = CompiledKernel(
    "optimizers",
    dict.fromkeys(
        (
            *("rmsprop", "rmsprop_momentum", "rmsprop_centered", "rmsprop_centered_momentum"),
            *("nadam", "radam", "radam_unrectified", "adamax", "adadelta", "rprop"),
        ),
        (INT64,),
    ),
)


class Numbers(ctypes.Structure):
    """The numbers of a step, as in ``optimizers.c``."""

    _fields_ = tuple((name, ctypes.c_float) for name in ("sign", "kept", "decay", "rate", "eps", *"abcde"))


def addresses_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the addresses of a parameter, its gradient and its states, and their length.

    None where one is not of fp32 or has no memory, or they do not lie there without gaps and in the same order.
    """
    if not all(map(_is_plain, tensors)):
        try:
            check(tensors, (_FP32,) * len(tensors))
        except UnsupportedTensorError:
            return None
    addresses, count = [tensor.data_ptr() for tensor in tensors], tensors[0].numel()
    if count and not all(addresses):
        return None  # a storage was released
    return [*addresses, *[0] * (_TENSORS - len(tensors)), count]


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are those that lie in memory one after another."""
    is_in_order = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    return is_in_order and tensor.dtype is torch.float32 and not tensor.is_neg()
