"""Tensors as the bytes that they are, whatever their dtype."""

from __future__ import annotations

from typing import Any

import torch

from nano_loop.errors import NanoError, problem


def raw_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as a flat uint8 tensor.

    Raises
    ------
    NanoError
        If it is not strided and contiguous, not on the CPU, or quantized.
    """
    strided = tensor.layout is torch.strided
    if not strided or tensor.device.type != "cpu" or tensor.is_quantized or not tensor.is_contiguous():
        kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
        needed = "ranks exchange contiguous tensors on the CPU that are not quantized"
        raise NanoError(problem(f"a tensor ({kind})", needed, "Pass tensor.cpu().contiguous()"))
    # Not `view(-1)`, which keeps a stride of 0 that a tensor of one element may have.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor; see `raw_tensor`."""
    found: Any = raw_tensor(tensor).numpy()
    return memoryview(found)
