"""Puts torch's own kernels back where those of IPEX 2.8 are wrong, which without this nothing would tell."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from nano_loop.intercept.operators import overridden, plainly

_repairs = ExitStack()  # never closed: IPEX's kernels stay as long as the process does
_in_force = False


def repair() -> None:
    """Replace four of IPEX's kernels, in the whole process, until it ends. Call it after IPEX's import.

    - ``layer_norm`` and ``group_norm`` have kernels without a derivative that torch could see. In plain PyTorch they
      differentiate themselves, but where torch itself takes an operator apart, gradients are silently None under
      AOTAutograd, and 0 under `torch.func` and in forward mode.
    - Under autocast, its ``group_norm`` returns bf16 for an fp32 input, and torch's fp32.
    - Its ``mean`` with ``dim=None`` returns the sum.
    """
    global _in_force
    if _in_force:
        return
    for name in ("layer_norm", "group_norm"):
        torch_s_own = getattr(torch.ops.aten, name).default.decompose
        _repairs.enter_context(overridden(name, plainly(torch_s_own), "AutogradCPU"))
    _repairs.enter_context(overridden("group_norm", lambda _: torch.library.fallthrough_kernel, "AutocastCPU"))
    _repairs.enter_context(overridden("mean.dim", plainly(_mean), "CPU"))
    _in_force = True


def _mean(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return what torch's kernel does that writes to a tensor of the caller's, which IPEX has left alone."""
    out = x.new_empty(0, dtype=dtype or x.dtype)
    return torch.mean(x, dim, keepdim, dtype=dtype, out=out)
