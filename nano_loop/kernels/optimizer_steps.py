"""The functions of ``optimizers.c``, which step parameters and clip gradients, and what they take."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import BF16, DENSE, FP32, Pointer, UnsupportedTensorError, check
from nano_loop.patching.objects.optimizers import is_dense

_FP32 = Pointer((torch.float32,), DENSE)
_KIND = attrgetter("dtype", "layout", "is_cpu")
_TENSORS = 5  # of a parameter: itself, its gradient, and up to three states

#: Each function that steps takes rows of `addresses_of`, and the numbers of a step; each that clips, what
#: `gradients_in_memory` returns, and what is left of gradients at most. Those that clip by a norm write it.
KERNEL = CompiledKernel(
    "optimizers",
    {
        **dict.fromkeys(
            (
                *("rmsprop", "rmsprop_momentum", "rmsprop_centered", "rmsprop_centered_momentum"),
                *("nadam", "radam", "radam_unrectified", "adamax", "adadelta", "rprop"),
                *("clip_value_float32", "clip_value_bfloat16"),
            ),
            (),
        ),
        "clip_norm_float32": (FP32,),
        "clip_norm_bfloat16": (BF16,),
    },
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


def gradients_in_memory(gradients: Sequence[Tensor], tables: Sequence[tuple[Tensor, Tensor, int]] = ()) -> bytes | None:
    """Return gradients of one dtype as the functions that clip take them, or None where they do not take one.

    Parameters
    ----------
    gradients : sequence of torch.Tensor
        Those that are read as a whole.
    tables : sequence of tuple
        Contiguous ones of which only some rows are not zero, with a list of these rows, and its length.
    """
    kinds = {*map(_KIND, gradients), *(_KIND(table) for table, *_ in tables)}
    if len(kinds) > 1 or any((layout, is_cpu) != (torch.strided, True) for _, layout, is_cpu in kinds):
        return None
    if any(map(Tensor.is_neg, gradients)):
        return None
    if not all(map(Tensor.is_contiguous, gradients)) and not all(map(is_dense, gradients)):
        return None
    addresses, counts = [*map(Tensor.data_ptr, gradients)], [*map(Tensor.numel, gradients)]
    if 0 in addresses and any(count and not address for address, count in zip(addresses, counts, strict=True)):
        return None  # a storage was released
    numbers: list[Iterable[int]] = [*zip(addresses, counts, strict=True)]
    numbers += [(table.data_ptr(), -table.size(1), rows.data_ptr(), length) for table, rows, length in tables]
    return in_memory(numbers)


def in_memory(rows: Iterable[Iterable[int]]) -> bytes:
    """Return rows of numbers one after another, as the functions take them."""
    return array("q", [*chain.from_iterable(rows)]).tobytes()  # from an iterator, it takes five times as long


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are those that lie in memory one after another."""
    is_in_order = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    return is_in_order and tensor.dtype is torch.float32 and not tensor.is_neg()
