"""`nn.SyncBatchNorm` on a CPU: the statistics of the batches of all ranks, by collectives of torch.distributed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed, nn

from nano_loop.patching.attributes import replaced


def synchronized_on_cpu() -> AbstractContextManager[None]:
    """Let `nn.SyncBatchNorm` train on a CPU in the body, which torch refuses in a process group."""
    return replaced(nn.SyncBatchNorm, "forward", _synchronized)


def _synchronized(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        if not self.training or input.device.type != "cpu" or not distributed.is_initialized():
            return original(self, input)
        x = input if input.dtype is torch.float64 else input.float()
        # Ranks may have batches of different sizes, or empty ones.
        own = torch.cat([_sum(x), x.new_tensor([x.numel() // x.size(1)])]).double()
        *_, count = sums = _RankSum.apply(own, self.process_group)  # type: ignore[no-untyped-call]
        mean = sums[:-1] / count
        centered = x - _by_channel(mean, x)
        squares = _RankSum.apply(_sum(centered.square()).double(), self.process_group)  # type: ignore[no-untyped-call]
        output = centered * _by_channel((squares / count + self.eps).rsqrt(), x)
        with torch.no_grad():
            _update(self, mean, squares / (count - 1).clamp(min=1))
        if self.weight is not None:
            output = output * _by_channel(self.weight, x) + _by_channel(self.bias, x)
        return output.to(input.dtype)

    return forward


class _RankSum(torch.autograd.Function):
    """The sum over ranks. Each rank's gradient is that of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, total = group, own.clone()  # undefined gradients are zeros here: each rank calls the collective
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _RankSum.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def _update(norm: nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Let the running statistics of a norm take in those of a batch."""
    if not norm.track_running_stats:
        return
    factor, counter = norm.momentum or 0.0, norm.num_batches_tracked
    if counter is not None:
        counter.add_(1)
        factor = 1.0 / float(counter) if norm.momentum is None else factor
    for running, current in ((norm.running_mean, mean), (norm.running_var, variance)):
        if running is not None:
            running.lerp_(current.to(running.dtype), factor)


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum([0, *range(2, x.dim())])


def _by_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))
