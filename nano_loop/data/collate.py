"""Batches of samples that hold numpy arrays: those of one field are copied into its tensor by one operation.

torch makes a tensor of each array before it stacks them, which takes ten times as long. Containers, other types and
errors are left to torch's own function.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from nano_loop.patching.torch_private_loaders import default_collate_by

ARRAYS = (np.ndarray, np.memmap)
_MOST_DIMENSIONS = 3  # torch may stack arrays of more dimensions as channels_last
_form_of = operator.attrgetter("shape", "strides", "dtype")


def collate(samples: list[Any]) -> Any:
    """Return what `torch.utils.data.default_collate` returns.

    In a loader's worker process torch stacks in shared memory, so it does all there.
    """
    if get_worker_info() is not None:
        return default_collate(samples)
    return default_collate_by(samples, _stacked)


def _stacked(arrays: Sequence[Any]) -> Tensor | None:
    """Return arrays of one form in a tensor, or None if torch has to stack them, or to refuse them."""
    first = arrays[0]
    if not 1 <= first.ndim <= _MOST_DIMENSIONS or first.dtype.kind not in "biufc":
        return None
    if not {*map(type, arrays)} <= {*ARRAYS} or len({*map(_form_of, arrays)}) > 1:
        return None
    one = torch.as_tensor(first)  # with torch's errors and warnings about such arrays
    if one.device.type != "cpu":
        return None
    stacked = torch.empty((len(arrays), *one.shape), dtype=one.dtype, device="cpu")
    np.concatenate(arrays, out=stacked.numpy().reshape(len(arrays) * len(first), *first.shape[1:]))
    return stacked
