"""Collates samples of numpy arrays: the arrays of a field are copied into its tensor by one operation.

torch converts each array to a tensor before it stacks them, which takes ten times as long. torch's own function handles
containers, other types and errors.
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
    """Return the same as `default_collate`, which a loader's worker calls: it stacks in shared memory."""
    if get_worker_info() is not None:
        return default_collate(samples)
    return default_collate_by(samples, _stacked)


def _stacked(arrays: Sequence[Any]) -> Tensor | None:
    """Stack arrays of equal shape and dtype in a tensor. Return None if torch must stack or refuse them."""
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
