"""Finds out whether all ranks compute the same: then several processes gain nothing, and nothing says so.

The ranks compare their gradients before they are averaged, at a few averagings. Equal gradients come from equal
batches. Different ones come from different batches, unless the ranks have drawn different random numbers, as for
dropout. Then the inputs of the calls into models decide, together with the places where the outputs of the first have
gradients: a loop may give all ranks one graph, and each rank a loss over different nodes. Where the loop itself
draws, as noise or as actions of an agent, inputs differ, and each rank's work counts as different.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nano_loop.distributed.averaging.checksums import FIRST, is_due
from nano_loop.distributed.loaders.alike import digest
from nano_loop.distributed.random_states import differing, process_states
from nano_loop.distributed.ranks import Ranks
from nano_loop.errors import problem
from nano_loop.intercept.nested import find
from nano_loop.intercept.user_code import Place, users_place, warn_once

_MOST_CALLS = 32  # between two averagings, as of an agent that acts
_TOLERANCE = 1e-5  # of a norm; ranks with other numbers of threads round differently
_HEAD = struct.Struct("<??II")
_PAIR = struct.Struct("<dd")
_ADVICE = (
    "Iterate a DataLoader, whose batches are divided, or take other batches on each rank, such as "
    "x[nano_loop.global_rank()::nano_loop.world_size()]. Otherwise leave out num_processes"
)

#: How often a line has averaged what was the same on all ranks: a function may be called for each step.
_counts: dict[tuple[str, int], int] = {}


class _Evidence(NamedTuple):
    """What one rank knows of its work since the last averaging."""

    delivered: bool  # a divided loader has delivered a batch
    drew: bool  # random numbers that differ from rank to rank
    inputs: int  # a digest of those of the calls into models; 0 if there was none
    places: int  # a digest of where its outputs have gradients; 0 if nothing is known
    gradients: list[tuple[float, float]]  # the sum and the norm for each parameter

    def pack(self) -> bytes:
        pairs = b"".join(_PAIR.pack(*pair) for pair in self.gradients)
        return _HEAD.pack(self.delivered, self.drew, self.inputs, self.places) + pairs

    @classmethod
    def unpack(cls, packed: bytes) -> _Evidence:
        delivered, drew, inputs, places = _HEAD.unpack_from(packed)
        return cls(delivered, drew, inputs, places, [*_PAIR.iter_unpack(packed[_HEAD.size :])])


class Sameness:
    """Notes what this rank computes between two averagings, and compares it with the other ranks.

    The result is in ``ranks.context.sharding.undivided``.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._averagings = 0
        self._inputs = self._places = 0  # digests; see `_Evidence`
        self._calls = 0  # since the last averaging
        self._states: list[Any] = []  # random states from which on this rank has not drawn alone

    @property
    def is_due(self) -> bool:
        """Whether the ranks compare at the next averaging; the same on all ranks."""
        return self._averagings == 0 or is_due(self._averagings)

    @property
    def _asks(self) -> bool:
        """Whether more than the batches' origin has to be compared."""
        return self.is_due and not self._ranks.context.sharding.delivered

    def before_call(self, *arguments: Any) -> None:
        """Take note of a call into a model for which gradients are on."""
        if self._asks and self._calls < _MOST_CALLS:
            self._states = self._states or process_states()  # the ranks' own, from the first call on
            self._inputs = digest(self._inputs, arguments) or 1
            self._calls += 1

    def after_call(self, outputs: Any) -> None:
        """Take note of the outputs of a call."""
        if self._asks and self._calls == 1:
            for place, output in enumerate(find(torch.Tensor, outputs)):
                if output.grad_fn is not None:  # not on the tensor, which may be saved with its hooks
                    output.grad_fn.register_prehook(functools.partial(self._note, place))

    def evidence(self, parameters: Sequence[torch.Tensor]) -> bytes:
        """Return what the other ranks compare with theirs, or nothing if no comparison is due."""
        if not self.is_due:
            return b""
        pairs = [_sum_and_norm(each.grad) for each in parameters] if self._asks else []
        return _Evidence(self._ranks.context.sharding.delivered, self._drew(), self._inputs, self._places, pairs).pack()

    def compare(self, packed: Sequence[bytes]) -> None:
        """Judge what all ranks have returned from `evidence`, and begin anew."""
        division = self._ranks.context.sharding
        if self.is_due:
            division.undivided = _same([_Evidence.unpack(each) for each in packed], division.undivided)
        elif division.delivered:
            division.undivided = False
        if self._ranks.rank == 0 and (division.undivided or self.is_due):
            self._count()
        self._averagings += 1
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._inputs = self._places = self._calls = 0
        self._states = process_states() if self.is_due and self._averagings else []
        self._ranks.context.sharding.delivered = False

    def _drew(self) -> bool:
        return not self._states or any(differing(self._states, process_states()))

    def _note(self, place: int, gradients: Any) -> None:
        rows = [each.detach().ne(0).unsqueeze(-1).flatten(1).any(1) for each in gradients if _has_rows(each)]
        self._places = digest(self._places, place, rows) or 1

    def _count(self) -> None:
        """Warn once enough has been averaged; a single step is nothing to warn of."""
        division, place = self._ranks.context.sharding, users_place()
        if place is None or "undivided" in division.warned or division.chosen:
            return
        line = place.filename, place.number
        _counts[line] = _counts.get(line, 0) + 1 if division.undivided else 0
        if _counts[line] > FIRST and self.is_due:
            division.warned.add("undivided")
            self._warn(place)

    def _warn(self, place: Place) -> None:
        given = f"each of the {self._ranks.size} ranks computes the same batches"
        warn_once(problem(given, "several processes gain nothing, and auto_lr leaves the rate at 1×", _ADVICE), place)


def _same(ranks: Sequence[_Evidence], before: bool) -> bool:
    """Whether it is shown that all ranks have computed the same; `before` if none has computed anything."""
    if any(each.delivered for each in ranks):
        return False
    gradients = [each.gradients for each in ranks]
    if not any(norm for each in gradients for _, norm in each):
        return before
    if all(len(each) == len(gradients[0]) and all(map(_close, each, gradients[0])) for each in gradients):
        return True
    if not any(each.drew for each in ranks):
        return False
    return ranks[0].places != 0 and len({(each.inputs, each.places) for each in ranks}) == 1


def _close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    bound = _TOLERANCE * max(one[1], other[1])
    pairs = zip(one, other, strict=True)
    return all(a == b or abs(a - b) <= bound or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def _has_rows(gradient: Any) -> bool:
    return isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided and gradient.dim() > 0


def _sum_and_norm(gradient: torch.Tensor | None) -> tuple[float, float]:
    if gradient is None or not gradient.numel():
        return 0.0, 0.0
    values = gradient.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    dtype = torch.float64 if values.dtype is torch.float64 else torch.float32
    return float(values.sum(dtype=dtype)), float(torch.linalg.vector_norm(values, dtype=dtype))
