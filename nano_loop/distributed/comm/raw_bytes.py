"""Tensors of any dtype as bytes, contiguous copies of those with other strides, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nano_loop.errors import NanoError, error_message

#: Is given a rank, where a piece begins in that rank's stream, and the piece, which is only valid during the call.
Receive = Callable[[int, int, memoryview], None]


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
        expected = "ranks exchange contiguous tensors on the CPU that are not quantized"
        raise NanoError(error_message(f"a tensor ({kind})", expected, "Pass tensor.cpu().contiguous()"))
    # Not `view(-1)`, which keeps a stride of 0 that a tensor of one element may have.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor; see `raw_tensor`."""
    return memoryview(memory_of(raw_tensor(tensor)))


def memory_of(raw: torch.Tensor) -> Any:
    """Return the memory of a contiguous uint8 tensor as an array, which keeps the tensor alive.

    After `Tensor.numpy`, torch resizes the storage no more, as some observers of quantisation do.
    """
    return np.asarray(_Memory(raw)) if raw.numel() else np.empty(0, np.uint8)


class _Memory:
    """What numpy takes for an array."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw
        data, shape = (raw.data_ptr(), False), (raw.numel(),)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose memory holds the values: the tensor itself where it is one."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in a row."""
    whole = resolved(tensor)
    return whole.as_strided((whole.numel(),), (1,))  # `view(-1)` keeps a stride of 0 that one element may have


def with_copy(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    """Change a tensor of any strides in place, by a function that changes a contiguous tensor."""
    whole = resolved(tensor)
    change(whole)
    copy_back(whole, tensor)


def copy_back(whole: torch.Tensor, output: torch.Tensor) -> None:
    """Copy a contiguous copy to its tensor, unless that is contiguous itself."""
    if whole.data_ptr() != output.data_ptr():
        output.detach().copy_(whole)


def parts_of_streams(wholes: Sequence[torch.Tensor], starts: Sequence[int], first_rank: int = 0) -> Receive:
    """Return a function that fills tensors from the streams of rank `first_rank` and later ones, at `starts`."""
    pairs = [(start, raw_bytes(whole)) for start, whole in zip(starts, wholes, strict=True)]
    memories = dict(enumerate(pairs, first_rank))

    def receive(rank: int, offset: int, piece: memoryview) -> None:
        if rank not in memories:
            return
        start, memory = memories[rank]
        first, after = max(start, offset), min(start + len(memory), offset + len(piece))
        if first < after:
            memory[first - start : after - start] = piece[first - offset : after - offset]

    return receive
