"""Algorithms of a race: they compute from tensors of a call, with gradients or without, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nano_loop.autotune.tuner import Algorithm
from nano_loop.patching.walk import find


def with_gradients(compute: Callable[[], Tensor], leaves: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor]:
    """Return an output and the gradients of leaves."""
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):  # and not those of the loop
        out = compute()
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]


def _same(tensor: Any) -> Any:
    return tensor


def gradient_of_shape(*shape: int) -> Tensor:
    """Return a gradient of an output, with different numbers in each row."""
    row = torch.linspace(-1, 1, shape[-1], dtype=torch.bfloat16, device="cpu").sin_()
    return row.expand(shape).contiguous()


def leaf_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the same numbers, in a dtype, that can have a gradient."""
    return tensor.detach().to(dtype).requires_grad_()


def without_gradients(
    tensors: Iterable[Tensor | None], algorithms: Mapping[str, Callable[..., Any]]
) -> dict[str, Algorithm]:
    """Return algorithms that compute from these tensors, without gradients."""

    def of(name: str) -> Algorithm:
        @torch.no_grad()
        def algorithm() -> Sequence[Tensor]:
            results = algorithms[name](*tensors)
            return [*find(Tensor, results)]

        return algorithm

    return {name: of(name) for name in algorithms}
