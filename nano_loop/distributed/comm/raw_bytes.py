"""Views of tensors of any dtype as bytes, with contiguous copies of non-contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nano_loop.errors import NanoError, error_message


def raw_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a strided, contiguous CPU tensor that is not quantized as a flat uint8 tensor."""
    strided = tensor.layout is torch.strided
    if not strided or tensor.device.type != "cpu" or tensor.is_quantized or not tensor.is_contiguous():
        kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
        expected = "ranks exchange contiguous tensors on the CPU that are not quantized"
        raise NanoError(error_message(f"a tensor ({kind})", expected, "Pass tensor.cpu().contiguous()"))
    # `view(-1)` would keep a stride of 0, which a tensor of one element may have.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor; see `raw_tensor`."""
    return memoryview(memory_of(raw_tensor(tensor)))


def memory_of(raw: torch.Tensor) -> Any:
    """Return the memory of a contiguous uint8 tensor as an array, which keeps the tensor alive.

    After `Tensor.numpy`, torch no longer resizes the storage, as some quantization observers need to.
    """
    return np.asarray(_Memory(raw)) if raw.numel() else np.empty(0, np.uint8)


class _Memory:
    """Implements numpy's array interface."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw
        data, shape = (raw.data_ptr(), False), (raw.numel(),)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose memory holds the values: the tensor itself if possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a flat tensor."""
    whole = resolved(tensor)
    return whole.as_strided((whole.numel(),), (1,))  # `view(-1)` would keep a stride of 0


def with_copy(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    """Change a tensor of any strides in place by a function that requires a contiguous tensor."""
    whole = resolved(tensor)
    change(whole)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(whole)
