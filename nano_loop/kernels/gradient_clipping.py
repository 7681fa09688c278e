"""The functions of ``optimizers.c``, which clip gradients, and what they take."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import BF16, FP32
from nano_loop.patching.objects.optimizers import is_dense

_KIND = attrgetter("dtype", "layout", "is_cpu")

#: Each function takes what `gradients_in_memory` returns, and what is left of gradients at most. Those that clip by a
#: norm write it.
KERNEL = CompiledKernel(
    "optimizers",
    {
        "clip_value_float32": (),
        "clip_value_bfloat16": (),
        "clip_norm_float32": (FP32,),
        "clip_norm_bfloat16": (BF16,),
    },
)


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
    return array("q", [*chain.from_iterable(numbers)]).tobytes()  # from an iterator, it takes five times as long
