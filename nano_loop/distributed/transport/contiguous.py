"""Contiguous copies of tensors of any strides, which travel as bytes, and their way back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nano_loop.distributed.transport.raw_bytes import raw_bytes
from nano_loop.distributed.transport.shared_channel import Receive


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in a row."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,))  # `view(-1)` keeps a stride of 0 that one element may have


def with_copy(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    """Change a tensor in place, which may have any strides, by what changes a contiguous one."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    change(whole)
    copy_back(whole, tensor)


def copy_back(whole: torch.Tensor, output: torch.Tensor) -> None:
    """Copy a contiguous copy to its tensor, unless that is contiguous itself."""
    if whole.data_ptr() != output.data_ptr():
        output.detach().copy_(whole)


def parts_of_streams(wholes: dict[int, torch.Tensor], starts: dict[int, int]) -> Receive:
    """Return what fills the tensors, by rank, from where in that rank's stream they begin."""
    memories = {rank: raw_bytes(whole.view(-1)) for rank, whole in wholes.items()}

    def receive(rank: int, offset: int, piece: memoryview) -> None:
        if rank not in memories:
            return
        start, memory = starts[rank], memories[rank]
        first, after = max(start, offset), min(start + len(memory), offset + len(piece))
        if first < after:
            memory[first - start : after - start] = piece[first - offset : after - offset]

    return receive
