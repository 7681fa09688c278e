"""The operator that draws a mask of dropout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_loop.compiling.operators.library import DRAWS, NAMESPACE

torch.library.define(
    f"{NAMESPACE}::kept",
    "(SymInt[] size, SymInt[] stride, float probability, int number, *, Device device) -> Tensor",
    tags=DRAWS,
)


@torch.library.impl(f"{NAMESPACE}::kept", "CompositeExplicitAutograd")
def _kept(
    size: Sequence[int], stride: Sequence[int], probability: float, number: int, *, device: torch.device
) -> Tensor:
    """Return a mask of ones with this probability, drawn as `torch.Tensor.bernoulli_` draws it.

    Of bytes, since what Inductor makes takes twenty times as long to read a mask of bool.
    """
    return torch.empty_strided(size, stride, dtype=torch.uint8, device=device).bernoulli_(probability)


@torch.library.register_fake(f"{NAMESPACE}::kept")  # type: ignore[untyped-decorator]
def _kept_like(
    size: Sequence[int], stride: Sequence[int], probability: float, number: int, *, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=torch.uint8, device=device)
