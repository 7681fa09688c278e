"""Cross-entropy where ranks share each batch: a mean over rows of all ranks, such as tokens that are no padding.

Ranks have different numbers of rows that count, or other weights of classes, so they exchange their means and what
these count. The loss has the value of the whole batch's on every rank, and the gradient of this rank's part of it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nano_loop.distributed.comm.mismatch import MEAN_LOSS
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.kernels.head.cross_entropy import denominator
from nano_loop.patching.attributes import replaced
from nano_loop.patching.torch_private import in_functorch
from nano_loop.patching.torch_private_compiler import never_compiled, outside_graphs


@contextmanager
def means_over_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Let `functional.cross_entropy` and `functional.nll_loss` be means over the batch of all ranks in the body."""
    with ExitStack() as stack:
        for name in ("cross_entropy", "nll_loss"):
            stack.enter_context(replaced(functional, name, functools.partial(_over_split_batches, ranks)))
            stack.enter_context(outside_graphs(getattr(functional, name)))
        yield


def _over_split_batches(ranks: Ranks, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Tensor:
        share = ranks.context.divided
        # One rank alone may evaluate. A loop over samples computes each of them.
        if share is None or not torch.is_grad_enabled() or in_functorch():
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        is_mean = arguments["reduction"] == "mean" and arguments["size_average"] is None and arguments["reduce"] is None
        if not is_mean or arguments["input"].dim() < 2 or not arguments["input"].requires_grad:
            return original(**arguments)
        loss = original(**arguments)
        target = arguments["target"]
        if target.is_floating_point():  # probabilities of classes
            count = arguments["input"].numel() / arguments["input"].size(1)
        else:
            count = float(denominator(target.long(), arguments["weight"], arguments["ignore_index"], "mean"))  # type: ignore[arg-type]
        if not count:  # the mean of nothing is NaN
            loss = original(**{**arguments, "reduction": "sum"})
        parts = ranks.gather((count * float(loss.detach()), count), MEAN_LOSS)
        summed, total = map(sum, zip(*parts, strict=True))
        # The root of the backward has the weight of the share.
        factor = count * share.total / (total * share.samples) if total else 1.0
        if factor != 1:
            loss = loss * factor
        loss.data = torch.full_like(loss.detach(), summed / total if total else math.nan)
        return loss

    never_compiled(patched)
    return patched
