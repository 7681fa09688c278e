"""Batch norms whose graph keeps their input in bf16: the result of a convolution, which has rounded it.

See `nano_loop.kernels.narrow_copies`. The backward is that of `nano_loop.kernels.norm.norms`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nano_loop.kernels.narrow_copies import keeping_result
from nano_loop.kernels.norm.norms import KERNEL, OVERRIDES, layout_of

_BACKWARD = "native_batch_norm_backward"
_TRAINING = 4  # index of `training` after the input


def _reads_input(x: Tensor, *others: Any) -> bool:
    """Whether the C function supports the backward of a batch norm, which then reads the input."""
    return bool(others[_TRAINING]) and KERNEL.unavailable is None and layout_of(x) is not None


COPIED_INPUTS = (
    keeping_result("native_batch_norm", "input", _BACKWARD, _reads_input),
    *(replaced for replaced in OVERRIDES if replaced.operator == _BACKWARD),
)
