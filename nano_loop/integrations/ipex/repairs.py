"""Restores torch's kernels where those of IPEX 2.8 silently return wrong results."""

from __future__ import annotations

import functools
from contextlib import ExitStack

import torch
from torch import Tensor

from nano_loop.patching.operators.operators import plainly, registered


@functools.cache  # which keeps the replacements: IPEX's kernels stay until the process ends
def repair() -> ExitStack:
    """Replace four of IPEX's kernels in the whole process, until it ends. Call it after the import of IPEX.

    - The kernels of ``layer_norm`` and ``group_norm`` have no derivative that is registered with torch. In eager mode
      they differentiate themselves. Where torch decomposes operators, gradients are silently None (under AOTAutograd)
      or 0 (under `torch.func` and in forward mode).
    - Under autocast, ``group_norm`` of IPEX returns bf16 for an fp32 input, and torch's returns fp32.
    - ``mean`` of IPEX returns the sum for ``dim=None``.
    """
    own = {
        name: plainly(getattr(torch.ops.aten, name).default.decompose)(None) for name in ("layer_norm", "group_norm")
    }
    with ExitStack() as repairs:
        repairs.enter_context(registered(own, "AutogradCPU"))
        repairs.enter_context(registered({"group_norm": torch.library.fallthrough_kernel}, "AutocastCPU"))
        repairs.enter_context(registered({"mean.dim": plainly(_mean)(None)}, "CPU"))
        return repairs.pop_all()


def _mean(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the mean by torch's kernel for ``out=``, which IPEX does not replace."""
    out = x.new_empty(0, dtype=dtype or x.dtype)
    return torch.mean(x, dim, keepdim, dtype=dtype, out=out)
