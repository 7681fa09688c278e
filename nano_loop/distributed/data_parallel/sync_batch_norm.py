"""`nn.SyncBatchNorm` on a CPU: the statistics of the batches of all ranks, by collectives of torch.distributed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed, nn

from nano_loop.kernels.double_backward import gradients_of
from nano_loop.patching.attributes import replaced


def synchronized_on_cpu() -> AbstractContextManager[None]:
    """Let `nn.SyncBatchNorm` train on a CPU in the body, which torch refuses in a process group."""
    return replaced(nn.SyncBatchNorm, "forward", _synchronized)


def _synchronized(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        if not self.training or input.device.type != "cpu" or not distributed.is_initialized():
            return original(self, input)
        running_mean, running_var, factor = None, None, self.momentum or 0.0
        if self.track_running_stats:
            running_mean, running_var, counter = self.running_mean, self.running_var, self.num_batches_tracked
            if counter is not None:
                counter.add_(1)
                factor = 1.0 / float(counter) if self.momentum is None else factor
        running = running_mean, running_var, factor
        output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, running, self.eps, self.process_group
        )
        return output

    return forward


class _Normalize(torch.autograd.Function):
    """Normalizes by the mean and the variance of all ranks' batches, which may be of different sizes, or empty."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: Any, bias: Any, running: tuple[Any, Any, float], eps: float, group: Any
    ) -> torch.Tensor:
        x = _wide(input)
        mean, variance, count = _statistics(x, group)
        _update(*running, mean, variance * (count / max(count - 1, 1)))
        scale = (variance + eps).rsqrt()
        normalized = (x - _by_channel(mean, x)) * _by_channel(scale, x)
        ctx.save_for_backward(input, weight, bias, mean, scale)
        ctx.group, ctx.count, ctx.eps = group, count, eps
        return _affine(normalized, weight, bias).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        input, weight, bias, mean, scale = ctx.saved_tensors

        def compute() -> tuple[Any, ...]:
            x = _wide(input)
            normalized, dy = (x - _by_channel(mean, x)) * _by_channel(scale, x), gradient.to(x.dtype)
            sums = torch.stack([_sum(dy), _sum(dy * normalized)])
            of_bias, of_weight = sums.clone() if weight is not None else (None, None)
            if not ctx.needs_input_grad[0]:
                return None, of_weight, of_bias
            distributed.all_reduce(sums, group=ctx.group)
            means = sums / ctx.count
            centered = dy - _by_channel(means[0], dy) - normalized * _by_channel(means[1], dy)
            factor = scale if weight is None else scale.double() * weight
            return (centered * _by_channel(factor, dy)).to(gradient.dtype), of_weight, of_bias

        def by_torch(input: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
            x = _wide(input)
            centered = x - _by_channel(_sum_of_ranks(x, ctx.group) / ctx.count, x)
            variance = _sum_of_ranks(centered.square(), ctx.group) / ctx.count
            return _affine(centered * _by_channel((variance + ctx.eps).rsqrt(), x), weight, bias)

        return gradients_of(ctx, (input, weight, bias), (gradient,), compute, by_torch)


def _wide(input: torch.Tensor) -> torch.Tensor:
    return input if input.dtype is torch.float64 else input.float()


def _affine(normalized: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    output = normalized if weight is None else normalized * _by_channel(weight, normalized)
    return output if bias is None else output + _by_channel(bias, normalized)


def _sum_of_ranks(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sums by channel of all ranks' tensors, in float64, which can be differentiated. Collective."""
    total: torch.Tensor = _RankSum.apply(_sum(x).double(), group)  # type: ignore[no-untyped-call]
    return total


class _RankSum(torch.autograd.Function):
    """The sum over ranks. Each rank's gradient is that of all ranks' losses, as in the backward of `_Normalize`."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, total = group, own.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _RankSum.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def _statistics(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the mean and the variance of all ranks' batches by channel, in float64, and the number of values."""
    count = x.numel() // x.size(1)
    mean = _sum(x).double() / max(count, 1)
    squares = _sum((x - _by_channel(mean, x)).square()).double()
    own = torch.stack([torch.full_like(mean, count), mean, squares])
    gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, own, group=group)
    counts, means, sums = torch.stack(gathered).unbind(1)
    total = counts.sum(0)
    common = (counts * means).sum(0) / total
    variance = (sums + counts * (means - common).square()).sum(0) / total
    return common, variance, int(total[0])


def _update(running_mean: Any, running_var: Any, factor: float, mean: torch.Tensor, variance: torch.Tensor) -> None:
    for running, current in ((running_mean, mean), (running_var, variance)):
        if running is not None:
            running.lerp_(current.to(running.dtype), factor)


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum([0, *range(2, x.dim())])


def _by_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))
