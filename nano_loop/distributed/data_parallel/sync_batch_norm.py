"""Batch norm over the batch of all ranks: `nn.SyncBatchNorm`, and any batch norm of a run that splits its batches.

A layer communicates once in each direction: the ranks' sums and squared differences in the forward, and two sums of
gradients in the backward. The ranks add the same values in the same order, so the results are bitwise identical.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.overrides import has_torch_function

from nano_loop.distributed.comm.mismatch import BATCH_NORM
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.raw_bytes import raw_bytes
from nano_loop.distributed.comm.tensor_collectives import gathered
from nano_loop.kernels.norm.norms import batch_norm, batch_norm_backward, of_part
from nano_loop.patching.attributes import replaced
from nano_loop.patching.torch_private_compiler import never_compiled, outside_graphs


@contextmanager
def norms_over_all_ranks(ranks: Ranks) -> Iterator[None]:
    """In the body, compute `nn.SyncBatchNorm`, or all batch norms if ranks share batches, over all ranks' batch."""
    with replaced(nn.SyncBatchNorm, "forward", functools.partial(_synchronized, ranks)):
        if ranks.context.split is None:
            yield
            return
        make = functools.partial(_over_split_batches, ranks)
        with replaced(functional, "batch_norm", make), outside_graphs(functional.batch_norm):
            yield


def _synchronized(ranks: Ranks, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        if not self.training or input.device.type != "cpu" or not distributed.is_initialized():
            return original(self, input)
        if ranks.context.split is not None:  # then it is handled like other batch norms
            return super(nn.SyncBatchNorm, self).forward(input)
        factor, tracks = self.momentum or 0.0, self.track_running_stats
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else factor
        running = (self.running_mean, self.running_var) if tracks else (None, None)
        batch = _Batch(ranks, self.process_group)
        return _normalized(batch, input, running, self.weight, self.bias, factor, self.eps)

    return forward


def _over_split_batches(ranks: Ranks, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def patched(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        parameters = running_mean, running_var, weight, bias
        is_local = not training or ranks.context.divided is None or input.device.type != "cpu"
        if is_local or has_torch_function((input, *parameters)):
            return original(input, *parameters, training, momentum, eps)
        return _normalized(_Batch(ranks), input, parameters[:2], weight, bias, momentum, eps)

    never_compiled(patched)
    return patched


class _Batch:
    """The batch of all ranks or of a process group in one call of a norm. Its numbers are known after `join`."""

    def __init__(self, ranks: Ranks, group: Any = None) -> None:
        self._ranks, self._group = ranks, group
        self._mode = "" if torch.is_grad_enabled() else " under no_grad"
        self.count = self.distinct = 0.0  # values per channel, with and without duplicates on other ranks
        self.mean = self.variance = torch.empty(0)

    def join(self, count: float, sums: Tensor, squares: Tensor) -> float:
        """Replace sums and squared differences from the mean by the batch's; see `Exchange`. Collective."""
        rows = self._gathered(torch.cat([sums.new_tensor([count]), sums, squares]), "statistics")
        counts, by_rank, differences = rows[:, :1], rows[:, 1 : 1 + len(sums)], rows[:, 1 + len(sums) :]
        self.count = float(counts.sum())
        self.mean = by_rank.sum(0) / self.count
        apart = by_rank / counts.clamp(min=1) - self.mean
        squares.copy_((differences + counts * apart.square()).sum(0))
        sums.copy_(self.mean * self.count)
        self.variance = squares / self.count
        # A batch that was not split by a loader is the same on all ranks.
        is_split = self._ranks.context.split is None or not rows.eq(rows[0]).all()
        self.distinct = self.count if is_split else count
        return self.count

    def add(self, count: float, sums: Tensor, products: Tensor) -> float:
        """Replace sums of gradients and of their products by the batch's; see `Exchange`. Collective."""
        for own, total in zip((sums, products), self.total(torch.stack([sums, products])), strict=True):
            own.copy_(total)
        return self.count

    def total(self, own: Tensor) -> Tensor:
        """Return the sum over ranks. Collective."""
        return self._gathered(own, "gradients").sum(0)

    def _gathered(self, own: Tensor, what: str) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        if self._group is not None:
            return gathered(self._ranks, own, self._group)
        # Ranks that diverge detect it by this name.
        what = f"{BATCH_NORM}{self._mode}, {what} of {own.numel()} numbers"
        rows = self._ranks.channel.exchange(raw_bytes(own.contiguous()), what)
        return torch.stack([torch.frombuffer(row, dtype=own.dtype).view(own.shape) for row in rows])


def _normalized(
    batch: _Batch, x: Tensor, running: Any, weight: Tensor | None, bias: Tensor | None, momentum: float, eps: float
) -> Tensor:
    """Normalize by the statistics of a batch, and update the running statistics."""
    output: Tensor = _Normalized.apply(x, weight, bias, eps, batch)  # type: ignore[no-untyped-call]
    if batch.count == 1:  # the same error as torch
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    unbiased = batch.variance * (batch.distinct / max(batch.distinct - 1, 1))
    with torch.no_grad():
        for before, current in zip(running, (batch.mean, unbiased), strict=True):
            if before is not None:
                before.copy_(before.double() * (1 - momentum) + current * momentum)
    return output


class _Normalized(torch.autograd.Function):
    """Batch norm by the statistics of all ranks' rows, with the gradient of the sum of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, batch: _Batch) -> Tensor | None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        results = of_part(batch_norm, batch.join, x, weight, bias, None, None, True, 0.0, eps)
        if results is None:
            wide = x.to(dtype)
            count, sums = x.numel() // x.size(1), _sum(wide)  # a rank may have no rows
            batch.join(count, sums, _sum((wide - _by_channel(sums / max(count, 1), wide)).square()))
        inverse = (batch.variance + eps).rsqrt()
        ctx.eps, ctx.batch = eps, batch
        ctx.save_for_backward(x, weight, batch.mean.to(dtype), inverse.to(dtype))
        if results is not None:
            return results[0]
        output = (wide - _by_channel(batch.mean, wide)) * _by_channel(_times(inverse, weight), wide)
        return (output if bias is None else output + _by_channel(bias, wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        needs, batch, is_differentiated = ctx.needs_input_grad, ctx.batch, torch.is_grad_enabled()
        if not is_differentiated:
            args = gradient, x, weight, None, None, mean, inverse, True, ctx.eps, needs[:3]
            results = of_part(batch_norm_backward, batch.add, *args)
            if results is not None:
                return *results, None, None
        wide, own = x.to(mean.dtype), gradient.to(mean.dtype)
        if is_differentiated:  # including through the statistics
            mean = _RankSum.apply(_sum(wide), batch) / batch.count  # type: ignore[no-untyped-call]
            squares = _sum((wide - _by_channel(mean, wide)).square())
            inverse = (_RankSum.apply(squares, batch) / batch.count + ctx.eps).rsqrt()  # type: ignore[no-untyped-call]
        centered = wide - _by_channel(mean, wide)
        sums = torch.stack([_sum(own), _sum(own * centered)])
        of_input, of_bias, of_weight = None, sums[0], sums[1] * inverse
        if needs[0]:
            means = _RankSum.apply(sums, batch) / batch.count  # type: ignore[no-untyped-call]
            of_input = own - _by_channel(means[0], wide) - centered * _by_channel(means[1] * inverse.square(), wide)
            of_input = (of_input * _by_channel(_times(inverse, weight), wide)).to(x.dtype)
        return of_input, of_weight if needs[1] else None, of_bias if needs[2] else None, None, None


class _RankSum(torch.autograd.Function):
    """The sum over ranks. Each rank's gradient is that of the sum of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, batch: _Batch) -> Tensor:
        ctx.batch = batch  # undefined gradients become zeros, because each rank must call the collective
        return batch.total(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _RankSum.apply(gradient, ctx.batch), None  # type: ignore[no-untyped-call]


def _sum(x: Tensor) -> Tensor:
    return x.sum([0, *range(2, x.dim())], dtype=torch.float64)


def _times(inverse: Tensor, weight: Tensor | None) -> Tensor:
    return inverse if weight is None else inverse * weight


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))
