"""Checks whether shares of batches give the gradients of whole batches, which the witness computes.

At the first backward of a split batch, the ranks determine from the losses whether these are means or sums over
samples, and thereby the weights of their shares. The gradients then show whether this is sufficient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from nano_loop.data.random_states import checksum_of_libraries
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.split_batches import REDUCTION, SplitBatches, random_state
from nano_loop.distributed.data_parallel.checksums import are_equal, checksums, norm_of_gradients, rates_of
from nano_loop.distributed.data_parallel.gradient_differences import DOUBLE, ROUNDED, TOLERANCE, Differences
from nano_loop.distributed.data_parallel.loss_graph import split_by_depth
from nano_loop.distributed.data_parallel.parameters import Parameters
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.optimizers import held_by
from nano_loop.patching.torch_private_autograd import has_tensor_hooks, in_backward
from nano_loop.patching.user_code import warn

_SAME_SUM = 1e-7
_CHANGED, _MOST_CHANGED = 1e-2, 0.25  # of the norm in a step; if rounding explains differences
_OF_ALL_RANKS = "with split_batches, gradients are those of the whole batch after the backward"
_COUNT = 'Take the samples of all ranks, such as nano_loop.all_reduce(len(x), reduce_op="sum"), and not len(x)'
_KEPT = (
    "with split_batches, values that the loop keeps from a batch, such as a queue or a center, are of the rank's part"
)
_GATHER = "Combine them by nano_loop.all_gather(value) or nano_loop.all_reduce(mean), or pass split_batches=False"
_UNDIVIDED = "random numbers that are not divided"
_DRAWS = "with split_batches, NumPy and random draw for the rank's part only, and alike on all ranks with equal parts"
_DRAW = "Draw one value for each sample by torch, or mix samples in collate_fn. If the loop may draw so, ignore this"
_RULE = "with split_batches, a loss must be a mean or a sum over independent samples"
_WAYS = (
    "Divide a sum of losses by the count of all ranks and by nano_loop.share(), exchange statistics of a batch as "
    "nn.SyncBatchNorm does, or pass split_batches=False: each rank then takes whole batches"
)
_CALLS = ". If a dropout gets several batches as one, such as torch.cat([x, x]), call the model for each of them"


class Comparison:
    """Compares this run's gradients with the witness's, which rank 0 may have, until each optimizer has stepped."""

    def __init__(self, ranks: Ranks, split: SplitBatches, *, is_rounded: bool = False) -> None:
        self.split = split
        self._ranks = ranks
        self._witness = ranks.context.witness
        self.told: dict[str, Any] | None = None  # by the witness of the current backward, on rank 0
        self._stepped: dict[int, Optimizer] = {}  # by id
        self.tolerance = ROUNDED if is_rounded else TOLERANCE  # the largest relative difference of equal gradients
        self._losses: list[float] = []  # of the whole batch
        self._has_drawn = False  # whether NumPy or `random` have drawn between a batch and its backward
        self._is_last = False  # whether the witness reports only the losses of the next backward
        self._next_losses: list[float] | None = None  # these, during that backward
        self._last_layers: list[set[int]] = []  # the ids of their parameters
        self._earlier: set[int] = set()  # the ids of parameters of other layers, in any backward until now
        self.compared = 0  # the number of backwards in which gradients were compared
        self.rounding = 0.0  # the largest difference attributed to rounding, relative to the norm of all gradients
        #: The reason why gradients are not compared.
        self.why_not = "only local workers have a witness"
        if self._witness is not None:
            self.why_not = "no backward came before the first step"

    def note_call(self, inputs: Any, *, trains: bool) -> None:
        """Record the precision and the batch with which a model is called; see `SplitBatches.note_call`."""
        self.split.note_call(inputs, trains=trains)
        if torch.is_autocast_enabled("cpu"):
            self.tolerance = ROUNDED

    def begin_backward(self, losses: Sequence[torch.Tensor]) -> None:
        """Read the witness's results for this backward; collective at the first one of a split batch."""
        self._forget()
        self._next_losses = None
        told = self._next("backward")
        self._check_libraries(is_compared=told is not None)
        if told is not None and "file" not in told:  # the last one
            self._next_losses = told["losses"] if self._draws_as(told) else None
            self._stop(self.why_not)
            told = None
        share = self.split.share
        if self.split.reduction is None and share is not None and not share.is_whole:
            by_rank = self._ranks.gather(([float(loss.detach()) for loss in losses], self.split.sums), REDUCTION)
            if told is not None and not _are_parts(told["sums"], [sums for _, sums in by_rank]):
                self._stop("samples that are drawn at random, or in another order")
                told = None
            is_sum = told is not None and _are_sums(told["losses"], [values for values, _ in by_rank], self.tolerance)
            self.split.reduction = self._ranks.broadcast("sum" if is_sum else "mean", what=REDUCTION)
        self.told, self._losses = told, []
        if told is not None and self.tolerance != ROUNDED:
            self._last_layers, earlier = split_by_depth(losses)
            self._earlier |= earlier

    def _check_libraries(self, *, is_compared: bool) -> None:
        """Warn if NumPy or `random` have drawn for a batch, first after gradients were compared."""
        before = self.split.libraries
        if self._has_drawn or before is None or before == checksum_of_libraries():
            return
        self._has_drawn = True
        if self.compared and not is_compared and self._ranks.rank == 0:
            warn(error_message("NumPy or random draw for a batch, first after the first step", _DRAWS, _DRAW))

    def begin_step(self) -> None:
        """Read the witness's results for a step whose gradients the loop itself has computed; collective, likewise."""
        if self.told is not None:  # of a backward that has reached no parameter
            self._stop("the loop computes gradients itself after a backward")
        self.begin_backward([])

    def note_losses(self, losses: Sequence[float]) -> None:
        """Record the losses of the batch, computed from all shares."""
        self._losses = [*losses]
        expected, self._next_losses = self._next_losses, None
        if expected is None or len(expected) != len(losses):
            return
        allowed = self.tolerance * (10 if self.rounding else 1)
        for one, other in zip(losses, expected, strict=True):
            is_same = math.isclose(one, other, rel_tol=allowed, abs_tol=1e-3 * allowed)
            if not is_same and math.isfinite(one + other):
                got = f"a loss of {one:.6g} after the first steps, and of {other:.6g} with whole batches"
                warn(error_message(got, _KEPT, _GATHER))
                return

    def drawn(self, number: int) -> Any:
        """Return the shape and order of the n-th random draw of the witness for this batch, if it reports them."""
        told = self.told
        if self._witness is not None and not in_backward():
            self._forget()
            told = self._witness.next(self._ranks.check, stays=True)
        draws = told["draws"] if told is not None and told["batches"] == self.split.batches else []
        return draws[number] if number < len(draws) else None

    def end_backward(self, parameters: Parameters) -> None:
        """Compare the mean gradients of parameters with the witness's; raise a NanoError if they differ."""
        told = self.told
        if told is None:
            return
        named = parameters.named
        with torch.no_grad():
            whole = torch.load(told["file"], mmap=True, weights_only=True)
            self._forget()
            pairs = zip(told["parameters"], checksums(parameter for _, parameter in named), strict=False)
            has_same = told["shapes"] == [[*parameter.shape] for _, parameter in named]
            if not has_same or not all(are_equal(one, other, torch.float32) for one, other in pairs):
                self._stop("the ranks' parameters begin with other values")
                return
            gradients = [parameter.grad for _, parameter in named]
            if self.tolerance == TOLERANCE and all(parameter.dtype == torch.float64 for _, parameter in named):
                self.tolerance = DOUBLE
            differences = Differences(gradients, whole, self.tolerance)
        wrong = differences.wrong_layer([id(one) for _, one in named], self._last_layers, self._earlier)
        is_off = bool(wrong) or differences.is_off
        if is_off and not self._draws_as(told):
            got = f"gradients of shares that differ from those of whole batches, due to {_UNDIVIDED}"
            warn(error_message(got, _DRAWS, _DRAW))
            self._stop(_UNDIVIDED)
            return
        self.compared += 1
        has_hooks = any(has_tensor_hooks(parameter) for _, parameter in named)  # which change a share's gradient
        is_bounded = not wrong and differences.is_bounded and not has_hooks
        if is_off and is_bounded and differences.may_be_rounding(told["losses"], self._losses):
            self.rounding = max(self.rounding, differences.ratio(range(len(named))) or 0.0)
        elif is_off:
            places = wrong or range(len(named))
            by = (
                f"by {differences.ratio(places):.1g}"
                if any(map(differences.sizes.__getitem__, places))
                else "from none"
            )
            name, _ = named[max(places, key=differences.distances.__getitem__)]
            got = f"gradients of shares that differ {by} from those of whole batches, most in {name}"
            raise NanoError(error_message(got, _RULE, _WAYS + _CALLS * self.split.draws_several_rows))

    @staticmethod
    def _draws_as(told: dict[str, Any]) -> bool:
        """Whether the witness has drawn the same numbers; libraries' may not depend on the size, as mixup's factor."""
        is_drawn_alike = not told["drawn"] or told["libraries"] == checksum_of_libraries()
        return is_drawn_alike and bool(told["random_state"] == random_state())

    def _next(self, kind: str) -> dict[str, Any] | None:
        """Return the witness's report on its next operation, which should be of this kind, or None if it ends."""
        told = None if self._witness is None else self._witness.next(self._ranks.check)
        if told is None:
            self._stop(getattr(self._witness, "why", ""))
        elif told["kind"] != kind:
            got = f"a {kind} where the loop with whole batches has a {told['kind']}"
            warn(error_message(got, "with split_batches, all loops must take the same steps", _COUNT))
            self._stop(f"the loop takes a {kind} at another place")
            return None
        return told

    def before_step(self, optimizer: Optimizer, *, are_means: bool) -> None:
        """Compare a step's rates and gradients, which the loop may have changed; raise a `NanoError` if they differ."""
        told = None if self._witness is None or self._is_last else self._next("step")
        if told is None or not self.compared or not are_means:
            return
        rates = rates_of([optimizer])
        if repr(rates) != repr(tuple(told["rates"])):
            got = f"learning rates {[*rates]}, and {[*told['rates']]} with whole batches"
            raise NanoError(error_message(got, "with split_batches, they must be equal", _COUNT))
        own, norm = norm_of_gradients(held_by(optimizer)), told["norm"]
        allowed = _MOST_CHANGED if self.tolerance == ROUNDED or self.rounding else _CHANGED
        if not math.isclose(own, norm, rel_tol=allowed) and math.isfinite(own + norm):
            norms = f"the norm {own:.3g}, and {norm:.3g} with whole batches"
            got = f"gradients in optimizer.step() with {norms}, unlike after the backward"
            raise NanoError(error_message(got, _OF_ALL_RANKS, _COUNT))

    def after_step(self, optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> None:
        """Let the witness end after its next losses, once all optimizers have stepped."""
        self._stepped[id(optimizer)] = optimizer
        if self._witness is not None and all(id(one) in self._stepped for one in optimizers):
            if self.compared and not in_backward():
                self._is_last = True
            else:
                self._stop(self.why_not)

    def _forget(self) -> None:
        """Let the witness continue."""
        told, self.told = self.told, None
        if told is not None:
            Path(told["file"]).unlink(missing_ok=True)

    def _stop(self, why: str) -> None:
        if self._witness is not None:
            self._witness.close()
            self._witness, self.why_not = None, why
            self._stepped.clear()


def _are_parts(whole: Sequence[float], by_rank: Sequence[Sequence[float]]) -> bool:
    """Whether batches with these checksums are parts of one batch, which some ranks may have as a whole."""
    if len({len(whole), *map(len, by_rank)}) > 1:  # lists of samples
        whole, by_rank = [sum(whole)], [[sum(sums)] for sums in by_rank]
    return all(
        any(math.isclose(total, one, rel_tol=_SAME_SUM, abs_tol=_SAME_SUM) for one in (sum(parts), max(parts)))
        for total, parts in zip(whole, zip(*by_rank, strict=True), strict=True)
    )


def _are_sums(whole: Sequence[float], by_rank: Sequence[Sequence[float]], tolerance: float) -> bool:
    """Whether losses of a whole batch are sums of its parts' losses. If all are zero, they count as means."""
    if not any(whole) or {len(whole)} != {len(losses) for losses in by_rank}:
        return False
    totals = map(sum, zip(*by_rank, strict=True))
    return all(math.isclose(one, total, rel_tol=tolerance) for one, total in zip(whole, totals, strict=True))
