"""Random numbers if ranks share each batch (``split_batches=True``): equal to those of one process.

All ranks have the same random states. Each draws tensors with a batch dimension, such as a dropout's mask or noise, for
the whole batch, and keeps its part. All other draws, such as the weights of a layer that the loop creates, are the same
on all ranks. `nano_loop.distributed.data_parallel.drawing_operators` replaces the operators that draw.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.split_batches import Share
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.torch_private import base_of
from nano_loop.patching.user_code import users_place, warn

#: Name of the exchange at the first draw at a place in the program.
DRAWING = "a draw of random numbers"
_ALIKE = "with split_batches and equal parts, these are the same on all ranks, unless the first step draws them"
_PER_SAMPLE = "If they are per sample, draw them by a function such as torch.randn_like, or from the first step on"
#: The code of modules whose dropout inputs have time as the first dimension.
_RECURRENT = frozenset(kind.forward.__code__ for kind in (nn.RNN, nn.LSTM, nn.GRU))
_CALL = nn.Module.__call__.__code__


class _Part(NamedTuple):
    """Part of this rank in the tensor that a plain loop draws."""

    dimension: int  # of the batch
    start: int  # of the part, in this dimension
    total: int  # the size of this dimension in the plain loop
    order: tuple[int, ...]  # the dimensions in the order of memory in the plain loop, outermost first

    def of(self, whole: Tensor, like: Tensor) -> Tensor:
        return whole.narrow(self.dimension, self.start, like.size(self.dimension))

    def whole_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor for the whole batch."""
        sizes = [self.total if place == self.dimension else tensor.size(place) for place in self.order]
        return torch.empty(sizes, dtype=tensor.dtype).permute([self.order.index(i) for i in range(tensor.dim())])


@dataclass
class _Learnt:
    """What is known of the draws of one model, by place in the program and number of the draw there."""

    dimensions: dict[tuple[int, ...], int | None] = field(default_factory=dict)  # of the batch
    by_place: defaultdict[tuple[int, ...], set[int | None]] = field(default_factory=lambda: defaultdict(set))
    orders: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)  # see `_Part`
    unknown: set[tuple[int, ...]] = field(default_factory=set)  # the witness has reported nothing of these


def may_be_by_batch(tensor: Tensor, generator: torch.Generator | None) -> bool:
    """Whether a drawn tensor may have a batch dimension, unlike data that one rank makes to evaluate alone."""
    is_for_training = _is_default(generator) or torch.is_grad_enabled()
    return is_for_training and tensor.dim() > 0 and tensor.device.type == "cpu"


def _is_default(generator: torch.Generator | None) -> bool:
    return generator is None or generator is torch.default_generator


class RandomDraws:
    """Draws from any generator, in the loop's thread.

    Whether a draw has a batch dimension is determined once per model, place in the program, and number of the draw
    there in its batch: a loop may draw for activations and weights at one place, and a function may train models of
    different layouts. It follows from the tensor's sizes on all ranks if these have different numbers of samples, and
    otherwise from its sizes in the witness. If the witness does not report them, the draw is like all others at its
    place. If there are none, masks and ``*_like`` of tensors that are not parameters are assumed to have a batch
    dimension. For `in_witness`, see `Comparison.drawn`.
    """

    def __init__(self, ranks: Ranks, in_witness: Callable[[int], Any] = lambda number: None) -> None:
        #: The user's lines whose draws have the share's size, but were assumed to have no batch dimension.
        self.drawn_alike: dict[str, None] = {}
        self._ranks = ranks
        self._in_witness = in_witness
        self._places: dict[tuple[int, ...], int] = {}  # the number of draws for the current batch, by place
        self._learnt: Any = WeakIdKeyDictionary()  # a `_Learnt` by the outermost module, or by this object without one
        self._draws = False  # whether a tensor is being drawn for the whole batch

    def draw(
        self, tensor: Tensor, generator: torch.Generator | None, fill: Callable[[Tensor], Tensor], is_mask: bool
    ) -> Tensor | None:
        """Fill a tensor for the whole batch, and copy a part to `tensor`; return None if it has no batch dimension."""
        part = self._part(tensor, generator, is_mask)
        if part is None:
            return None
        self._draws = True
        try:
            whole = fill(part.whole_like(tensor))
        finally:
            self._draws = False
        return tensor.copy_(part.of(whole, tensor))

    def _part(self, tensor: Tensor, generator: torch.Generator | None, is_mask: bool) -> _Part | None:
        context = self._ranks.context
        split, share = context.split, context.divided
        is_evaluation = context.sharding.whole and not torch.is_grad_enabled()  # of whole batches
        if split is None or not split.is_loops or is_evaluation:
            return None
        if split.unequal_since is not None and _is_default(generator):
            self._ranks.equalize_random_states(DRAWING)
        if share is None or not may_be_by_batch(tensor, generator):
            return None
        number, split.draws = split.draws, split.draws + 1  # a nested draw counts as well
        # Other weights are initialized alike, without the other ranks: one may have evaluated alone before.
        if self._draws or (is_of_parameter(tensor) and not share.may_have_rows(tensor.shape)):
            return None
        if not number:
            self._places.clear()
        model, place = _site(tensor.dim())
        learnt = self._learnt.setdefault(self if model is None else model, _Learnt())
        site = *place, self._places.setdefault(place, 0)
        self._places[place] += 1
        if site not in learnt.dimensions:
            self._learn(learnt, site, tensor, share, number)
        known = learnt.by_place[place]
        if site in learnt.dimensions:
            known.add(dimension := learnt.dimensions[site])
        else:
            dimension = next(iter(known)) if len(known) == 1 else self._guessed(tensor, share, is_mask)
        if dimension is None or tensor.size(dimension) % share.samples:
            return None
        times = tensor.size(dimension) // share.samples  # of flattened samples, or of heads of an attention
        split.draws_several_rows |= times > 1
        if share.samples > 1 or site not in learnt.orders:  # the stride of a dimension of size 1 is arbitrary
            learnt.orders[site] = order_of(tensor)
        return _Part(dimension, share.start * times, share.total * times, learnt.orders[site])

    def _learn(self, learnt: _Learnt, site: tuple[int, ...], tensor: Tensor, share: Share, number: int) -> None:
        """Determine the batch dimension of a tensor, if any; raise if the shapes do not fit. Collective."""
        if site in learnt.unknown:
            return
        own = [*tensor.shape]
        told = self._in_witness(number) if share.is_even and share.may_have_rows(own) else None
        by_rank = self._ranks.gather((own, order_of(tensor), told), DRAWING)
        shapes, (_, order, told) = [shape for shape, *_ in by_rank], by_rank[0]  # no rank has more samples than rank 0
        if not share.is_even:
            learnt.dimensions[site], learnt.orders[site] = self._compared(shapes, share), order
            return
        if any(shape != own for shape in shapes):
            raise _refusal(shapes, [share.samples] * share.size)
        shape, order = told or ((), ())
        by_batch = [[*own[:i], size * share.size, *own[i + 1 :]] for i, size in enumerate(own)]
        if shape in (own, *by_batch):
            learnt.dimensions[site] = None if shape == own else by_batch.index(shape)
            learnt.orders[site] = tuple(order)
        else:
            learnt.unknown.add(site)

    def _compared(self, shapes: list[list[int]], share: Share) -> int | None:
        """Return the dimension in which the ranks' tensors have the shares' sizes, or None if all are equal."""
        counts = [Share.of(share.total, rank, share.size).samples for rank in range(share.size)]
        if all(shape == shapes[0] for shape in shapes):
            return None
        for dimension, size in enumerate(shapes[0]):
            before, behind = shapes[0][:dimension], shapes[0][dimension + 1 :]
            if shapes == [[*before, size * count / counts[0], *behind] for count in counts]:
                return dimension
        raise _refusal(shapes, counts)

    def _guessed(self, tensor: Tensor, share: Share, is_mask: bool) -> int | None:
        """Return the batch dimension if all ranks have equally many samples, so that sizes do not show it."""
        caller = _caller() if is_mask else None
        if caller is not None and caller.f_code in _RECURRENT:  # time comes first, even with batch_first
            return 1 if tensor.dim() == 3 and tensor.size(1) == share.samples else None
        is_mask = is_mask and (caller is None or not is_of_parameter(caller.f_locals["input"]))
        if is_mask and tensor.size(0) == share.samples:
            return 0
        if is_mask and tensor.dim() > 2 and tensor.size(1) == share.samples:  # time comes first, as in transformers
            return 1
        is_of_batch = tensor.size(0) == share.samples or (is_mask and tensor.size(0) % share.samples == 0)
        if is_of_batch and not is_of_parameter(tensor) and (place := users_place()) is not None:
            line = f"{os.path.basename(place.filename)}:{place.number}"
            if line not in self.drawn_alike and self._ranks.rank == 0:
                got = f"{line} draws random numbers of the shape {[*tensor.shape]}, not known to be per sample"
                warn(error_message(got, _ALIKE, _PER_SAMPLE))
            self.drawn_alike[line] = None
        return None


def _refusal(shapes: list[list[int]], counts: list[int]) -> NanoError:
    got = f"ranks with {counts} samples of a batch draw random numbers of the shapes {shapes}"
    allowed = "with split_batches, a draw must have one dimension of these sizes, or the same shape on all ranks"
    hint = (
        "Draw one row, or one for each of a fixed number of places, for each sample, and select some of them after "
        "that; pad sequences instead of packing them before a dropout. Or omit split_batches"
    )
    return NanoError(error_message(got, allowed, hint))


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor in the order of memory, outermost first."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _site(*more: int) -> tuple[nn.Module | None, tuple[int, ...]]:
    """Return the outermost module that is being called, and the place in the program as the calls that lead to it."""
    frame: FrameType | None = sys._getframe(2)
    outermost, places = None, [*more]
    while frame is not None:
        places += id(frame.f_code), frame.f_lasti
        outermost = frame if frame.f_code is _CALL else outermost
        frame = frame.f_back
    return outermost and outermost.f_locals["self"], tuple(places)


def _caller() -> FrameType | None:
    """Return the frame of `functional.dropout` or of a recurrent module that draws; compiled code has none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not functional.dropout.__code__ and frame.f_code not in _RECURRENT:
        frame = frame.f_back
    return frame


def is_of_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, whose shape does not depend on the batch."""
    return isinstance(base_of(tensor), nn.Parameter)
