"""What a channel between the ranks of a run is: a way for bytes and tensors to get from each rank to all others."""

from __future__ import annotations

from typing import Protocol

import torch

#: What the exchanges are for with which ranks begin to iterate a loader together.
ITERATION = "the iteration of a loader"


class Channel(Protocol):
    """Carries bytes and tensors between the ranks of a run.

    All methods are collective: every rank calls the same ones in the same order. Each wait ends with an error if
    another rank has failed or left, or after the run's timeout.

    The parameter ``what`` says what a collective is for, the same on every rank, for the error of ranks that part.
    """

    def gather(self, data: bytes, what: str = "") -> list[bytes]:
        """Return the bytes of all ranks, by rank; the lengths may differ."""

    def broadcast(self, data: bytes, source: int, what: str = "") -> bytes:
        """Return the bytes of rank `source`; those of other ranks are ignored."""

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` in place with that of rank `source`: contiguous, of any dtype that is not quantized."""

    def add_up(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous `tensor` in place with the sum over all ranks, the same to the bit on every rank."""

    def barrier(self) -> None:
        """Return when every rank has called it."""
