"""What a transport of gradient averaging is: a way for tensors to reach all ranks and come back as their mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Transport(Protocol):
    """Carries tensors between the ranks of a run.

    All methods but `leave` and `close` are collective: every rank calls the same ones in the same order. `average`
    relies on equal shapes and dtypes, so ranks first `exchange` a header to check them.
    """

    def exchange(self, header: torch.Tensor) -> list[torch.Tensor]:
        """Return the headers of all ranks, by rank, each a new tensor. Collective.

        Parameters
        ----------
        header : torch.Tensor
            uint8, of any length; the lengths may differ between ranks, and each arrives with its own.
        """

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor in place by its mean over all ranks, which is the same to the bit on every rank.

        Collective.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            On the CPU, of float32, float64, bfloat16, float16, complex64 or complex128, of any strides without
            overlap. Every rank gives the same shapes and dtypes in the same order; strides may differ.

        Raises
        ------
        NanoError
            Where a dtype is another, and where a rank that this one waits for has failed, or is too late.
        """

    def leave(self) -> None:
        """Announce that this rank averages no more, so that a rank which waits for it raises at once, if possible."""

    def close(self) -> None:
        """Give back all memory. A closed transport raises on use."""
