"""Cross-entropy if ranks share each batch: a mean over the rows of all ranks, such as tokens that are not padding.

Ranks have different numbers of counted rows, or different sums of class weights, so they exchange their means and these
denominators. On every rank, the loss has the value of the whole batch's, and the gradient of this rank's part of it.

The functions that torch's own call are replaced, not `functional.cross_entropy`, which programs import by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nano_loop.distributed.comm.mismatch import MEAN_LOSS
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.loss_graph import OVER_ALL_RANKS
from nano_loop.kernels.head.cross_entropy import MEAN, SUM, denominator, mean_of_rows
from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import listening
from nano_loop.patching.torch_private import ROW_LOSSES, in_functorch
from nano_loop.patching.torch_private_compiler import never_compiled, outside_graphs


@contextmanager
def means_over_all_ranks(ranks: Ranks) -> Iterator[None]:
    """In the body, let cross-entropy and the negative log-likelihood be means over the batch of all ranks."""
    module, names = ROW_LOSSES
    with ExitStack() as stack:
        stack.enter_context(listening(mean_of_rows, functools.partial(_over_all_ranks, ranks)))
        for name in names:
            stack.enter_context(replaced(module, name, _counting))
        for function in (functional.cross_entropy, functional.nll_loss):
            stack.enter_context(outside_graphs(function))
        yield


def _counting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a loss function of torch so that it reports the rows of its mean."""

    @functools.wraps(original)
    def loss(
        rows: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, *smoothing: float
    ) -> Tensor:
        def computed(reduction: int) -> Tensor:
            return original(rows, target, weight, reduction, ignored, *smoothing)

        def count() -> float:
            if target.is_floating_point():  # probabilities of classes
                return rows.numel() / rows.size(1)
            return float(denominator(target, weight, ignored, "mean"))  # type: ignore[arg-type]

        mean = computed(reduction)
        return mean_of_rows(mean, count, lambda: computed(SUM)) if reduction == MEAN and rows.dim() > 1 else mean

    never_compiled(loss)
    return loss


def _over_all_ranks(
    ranks: Ranks, mean: Tensor, count_rows: Callable[[], float], summed: Callable[[], Tensor]
) -> Tensor:
    """Return the mean over the rows of all ranks; see `mean_of_rows`. Collective in training."""
    share = ranks.context.divided
    # A rank may evaluate alone. A loop over samples computes each of them.
    if share is None or not mean.requires_grad or in_functorch():
        return mean
    count = count_rows()
    loss = mean if count else summed()  # the mean of no rows is NaN
    parts = ranks.gather((count * float(loss.detach()), count), MEAN_LOSS)
    total_loss, total = map(sum, zip(*parts, strict=True))
    # The root of the backward has the weight of the share.
    factor = count * share.total / (total * share.samples) if total else 1.0
    if factor != 1:
        loss = loss * factor
    node: Any = loss.grad_fn
    if node is not None:
        node.metadata[OVER_ALL_RANKS] = True
    loss.data = torch.full_like(loss.detach(), total_loss / total if total else math.nan)
    return loss
