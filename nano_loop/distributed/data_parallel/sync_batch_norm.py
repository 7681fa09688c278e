"""Batch norm over the batch of all ranks: `nn.SyncBatchNorm`, and every batch norm of a run that splits its batches.

A layer exchanges once in each direction: the ranks' sums and squared differences in the forward, and two sums of
gradients in the backward. The ranks add up the same numbers in the same order, so they have the same bits.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
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
from nano_loop.kernels.double_backward import gradients_of, save, saved
from nano_loop.kernels.norm.norms import of_part
from nano_loop.patching.attributes import replaced
from nano_loop.patching.torch_private_autograd import in_backward

_BIAS = 2  # its place among the inputs


@contextmanager
def norms_over_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Let batch norms in train mode compute over the batch of all ranks in the body.

    `nn.SyncBatchNorm` always does, which torch refuses on a CPU. Where ranks share each batch, all do: also
    `functional.batch_norm` that a module of the program calls.
    """
    with replaced(nn.SyncBatchNorm, "forward", functools.partial(_synchronized, ranks)):
        if ranks.context.split is None:
            yield
            return
        with replaced(functional, "batch_norm", functools.partial(_over_split_batches, ranks)):
            yield


def _synchronized(ranks: Ranks, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        if not self.training or input.device.type != "cpu" or not distributed.is_initialized():
            return original(self, input)
        if ranks.context.split is not None:  # then it is as any other
            return super(nn.SyncBatchNorm, self).forward(input)
        factor, tracks = self.momentum or 0.0, self.track_running_stats
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else factor
        running = (self.running_mean, self.running_var) if tracks else (None, None)
        batch = _Batch(ranks, self.process_group)
        return _normalized(batch, input, *running, self.weight, self.bias, factor, self.eps)

    return forward


def _over_split_batches(ranks: Ranks, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    process, thread = os.getpid(), threading.get_ident()  # of the loop

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def over_batch(input: Tensor, *parameters: Any, momentum: float, eps: float) -> Tensor:
        share = None if ranks.context.split is None else ranks.context.split.share
        # A worker of a loader, and another thread, train by themselves. A deep checkpoint recomputes in another thread.
        is_loops = os.getpid() == process and (threading.get_ident() == thread or in_backward())
        is_local = share is None or share.is_whole or not is_loops or input.device.type != "cpu"
        if is_local or has_torch_function((input, *parameters)):
            running, affine = parameters[:2], parameters[2:]
            return original(input, *running, *affine, training=True, momentum=momentum, eps=eps)
        return _normalized(_Batch(ranks), input, *parameters, momentum, eps)

    @functools.wraps(original)
    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        return over_batch(input, running_mean, running_var, weight, bias, momentum=momentum, eps=eps)

    return batch_norm


class _Batch:
    """The batch of all ranks, in one call of a norm.

    Parameters
    ----------
    ranks : Ranks
        The ranks of the run.
    group : torch.distributed.ProcessGroup, optional
        Those of the ranks that have the batch; by default all.

    Attributes
    ----------
    count : float
        How many values a channel has; known once the statistics are.
    """

    def __init__(self, ranks: Ranks, group: Any = None) -> None:
        self._ranks, self._group = ranks, group
        self._mode = "" if torch.is_grad_enabled() else " under no_grad"
        self.count = self.distinct = 0.0
        self.mean = self.squares = torch.empty(0)

    def gathered(self, own: Tensor, what: str) -> Tensor:
        """Return what all ranks have, a row each. Collective."""
        if self._group is not None:
            return gathered(self._ranks, own, self._group)
        # Ranks that part find out by the name of what they exchange.
        rows = self._ranks.channel.exchange(raw_bytes(own), f"{BATCH_NORM}{self._mode}, {what} of {len(own)} numbers")
        return torch.stack([torch.frombuffer(row, dtype=own.dtype) for row in rows])

    def join(self, count: float, sums: Tensor, squares: Tensor) -> float:
        """Make sums, and squared differences from the mean, those of the batch; return its values by channel."""
        rows = self.gathered(torch.cat([sums.new_tensor([count]), sums, squares]), "statistics")
        counts, by_rank, differences = rows.split([1, len(sums), len(sums)], dim=1)
        self.count = float(counts.sum())
        self.mean = by_rank.sum(0) / self.count
        apart = by_rank / counts.clamp(min=1) - self.mean
        self.squares = (differences + counts * apart.square()).sum(0)
        # A batch that no loader has split is the same on all ranks, and its values count once.
        is_split = self._ranks.context.split is None or not rows.eq(rows[0]).all()
        self.distinct = self.count if is_split else count
        sums.copy_(self.mean * self.count)
        squares.copy_(self.squares)
        return self.count

    def add(self, count: float, sums: Tensor, products: Tensor) -> float:
        """Make two sums those over the batch; return its values by channel."""
        total = self.gathered(torch.cat([sums, products]), "gradients").sum(0)
        sums.copy_(total[: len(sums)])
        products.copy_(total[len(sums) :])
        return self.count


def _normalized(
    batch: _Batch,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise by the statistics of a batch, which the running ones take in."""
    output: Tensor = _Normalized.apply(x, weight, bias, eps, batch)  # type: ignore[no-untyped-call]
    if batch.count == 1:  # torch has the same error
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    unbiased = batch.squares / batch.count * (batch.distinct / max(batch.distinct - 1, 1))
    with torch.no_grad():
        for running, current in ((running_mean, batch.mean), (running_var, unbiased)):
            if running is not None:
                running.mul_(1 - momentum).add_(current.to(running.dtype), alpha=momentum)
    return output


class _Normalized(torch.autograd.Function):
    """Batch norm by the statistics of all ranks' rows. Each rank's gradient is that of all ranks' losses."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, batch: _Batch
    ) -> Tensor:
        results = of_part("batch_norm", batch.join, x, weight, bias, None, None, True, 0.0, eps)
        if results is None:
            batch.join(*_sums(x))
        statistics = batch.mean.to(_wide(x)), (batch.squares / batch.count).to(_wide(x))
        ctx.eps, ctx.batch = eps, batch
        save(ctx, (x, weight, bias), statistics, {_BIAS})
        return _affine(x, weight, bias, statistics, eps) if results is None else results[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # An undefined gradient is zeros here: each rank exchanges.
        inputs, statistics = saved(ctx, 3)
        compute = functools.partial(_gradients, ctx, gradient, *inputs, statistics)
        return gradients_of(ctx, inputs, (gradient,), compute, functools.partial(_by_torch, ctx.batch, ctx.eps))


def _sums(x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return how many values each channel has, their sums, and their squared differences from the mean."""
    count, unused = x.numel() // x.size(1), torch.zeros(2, x.size(1), dtype=_wide(x), device="cpu")
    mean, variance = torch.batch_norm_update_stats(x, *unused, 0.0) if count else unused  # ranks may have none
    return count, mean.double() * count, variance.double() * count


def _gradients(
    ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Any
) -> Sequence[Tensor | None]:
    """Return the gradients of input, weight and bias."""
    mean, variance = statistics
    inverse, needs = (variance.double() + ctx.eps).rsqrt(), ctx.needs_input_grad[:3]
    running = None, None
    args = (gradient, x, weight, *running, mean, inverse.to(mean.dtype), True, ctx.eps, needs)
    results = of_part("batch_norm_backward", ctx.batch.add, *args)
    if results is not None:
        return results
    factors = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    wide, gradient = x.to(mean.dtype), gradient.to(mean.dtype)  # so that what is added up below was not rounded
    of_input, of_weight, of_bias = gradient, torch.zeros_like(mean), torch.zeros_like(mean)
    if x.numel():
        of_input, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, wide, factors, mean, variance, None, None, False, ctx.eps, [True] * 3
        )
    if needs[0]:
        sums, products = of_bias.to(torch.float64, copy=True), of_weight.double() / inverse
        scale = factors.double() * inverse / ctx.batch.add(0.0, sums, products)
        slopes, offsets = (-scale * inverse * products).to(mean.dtype), (-scale * sums).to(mean.dtype)
        of_input = of_input.add_(_affine(wide, slopes, offsets, statistics, ctx.eps)).to(x.dtype)
    return [
        of_input if needs[0] else None,
        None if weight is None else of_weight.to(weight.dtype),
        None if bias is None else of_bias.to(bias.dtype),
    ]


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Any, eps: float) -> Tensor:
    """Normalise by given statistics."""
    mean, variance = statistics
    factors, offsets = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
    if not x.numel():
        return torch.empty_like(x)
    output: Tensor = torch.native_batch_norm(x, factors, offsets, mean, variance, False, 0.0, eps)[0]
    return output


def _by_torch(batch: _Batch, eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute the same by operators that have second derivatives. Collective, as are these."""
    wide = x.to(_wide(x))
    mean = _RankSum.apply(_sum(wide), batch) / batch.count  # type: ignore[no-untyped-call]
    centered = wide - _by_channel(mean, wide)
    squares = _RankSum.apply(_sum(centered.square()), batch)  # type: ignore[no-untyped-call]
    output = centered * _by_channel((squares / batch.count + eps).rsqrt(), wide)
    output = output if weight is None else output * _by_channel(weight, wide)
    return output if bias is None else output + _by_channel(bias, wide)


class _RankSum(torch.autograd.Function):
    """The sum over ranks. Each rank's gradient is that of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, batch: _Batch) -> Tensor:
        ctx.batch = batch  # undefined gradients are zeros here: each rank calls the collective
        return batch.gathered(own, "derivatives").sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _RankSum.apply(gradient, ctx.batch), None  # type: ignore[no-untyped-call]


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of statistics."""
    return torch.promote_types(x.dtype, torch.float32)


def _sum(x: Tensor) -> Tensor:
    return x.sum([0, *range(2, x.dim())]).double()


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))
