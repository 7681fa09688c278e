"""Ranks that all compute the same: then several processes gain nothing, and nothing says so.

The ranks compare their gradients before they are averaged, at a few averagings. Equal gradients come from equal
batches. Different ones come from different batches, unless the ranks have drawn different random numbers, as for
dropout. Then a digest decides, of the inputs of the calls into models and of the places where the outputs of the
first have gradients: a loop may give all ranks one graph, and each rank a loss over different nodes. What a model has
returned before, such as a state that is carried on, does not count as an input. Where the loop itself draws, as noise
or as actions of an agent, inputs differ, and each rank's work counts as different.

Batches of a divided loader are different, unless its dataset ignores the index, as one that reads the next line of a
file. So the ranks also compare digests of the batches that their loaders have delivered.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from nano_loop.data.random_states import differing, process_states
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.checksums import FIRST, is_due, sum_and_norm
from nano_loop.distributed.sharding.dataset_digest import digest
from nano_loop.errors import error_message
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.user_code import Place, users_place, warn, warn_once
from nano_loop.patching.walk import find

_MOST_CALLS = 32  # between two averagings, as of an agent that acts
_TOLERANCE = 1e-5  # of a norm; ranks with other numbers of threads round differently
_EVIDENCE = struct.Struct("<??IIIdd")
_ADVICE = (
    "Iterate a DataLoader, whose batches are divided, or take other batches on each rank, such as "
    "x[nano_loop.global_rank()::nano_loop.world_size()]. Otherwise leave out num_processes"
)
_GAIN = "several processes gain nothing, and auto_lr leaves the rate at 1×"
_INDEX = (
    "Let the dataset return the rows of the index that it is given, or make it an IterableDataset. With a single batch "
    "an epoch, leave out num_processes"
)

#: How often a line has averaged what was the same on all ranks: a function may be called for each step.
_counts: dict[tuple[str, int], int] = {}
#: The first parameters of models whose training has been warned of.
_warned_of: Any = WeakIdKeyDictionary()


class _Evidence(NamedTuple):
    """What one rank knows of its work since the last averaging."""

    delivered: bool  # a divided loader has delivered a batch
    drew: bool  # random numbers that differ from rank to rank
    inputs: int  # a digest of those of the calls into models; 0 if there was none
    places: int  # a digest of where its outputs have gradients; 0 if nothing is known
    batch: int  # a digest of the first that the loader has delivered; 0 if there was none
    total: float  # of the gradients, with another factor for each parameter
    norm: float


class DuplicateWork:
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
        self._returned: dict[int, StorageWeakRef] = {}  # memory of what the models have returned
        self._batch = 0  # that of all ranks, when they compared it last
        self._same_data = False  # whether the loaders of all ranks deliver the same
        self._repeated = 0  # averagings of the same in this run

    @property
    def is_due(self) -> bool:
        """Whether the ranks compare at the next averaging; the same on all ranks."""
        return is_due(self._averagings)

    @property
    def _expects_comparison(self) -> bool:
        """Whether the ranks compare at the next averaging, or at the one after it."""
        return self.is_due or is_due(self._averagings + 1)

    @property
    def _asks(self) -> bool:
        """Whether more than the batches' origin has to be compared."""
        return self.is_due and not self._ranks.context.sharding.delivered

    def before_call(self, *arguments: Any) -> None:
        """Take note of a call into a model for which gradients are on."""
        if self._asks and self._calls < _MOST_CALLS:
            self._states = self._states or process_states()  # the ranks' own, from the first call on
            self._inputs = digest(self._inputs, map_tensors(self._without_returned, arguments)) or 1
            self._calls += 1

    def after_call(self, outputs: Any) -> None:
        """Take note of the outputs of a call."""
        for place, output in enumerate(find(torch.Tensor, outputs)):
            if self._expects_comparison and output.layout is torch.strided:
                memory = _memory(output)
                self._returned[memory.cdata] = memory
            if self._asks and self._calls == 1 and output.grad_fn is not None:
                # Not on the tensor, which may be saved with its hooks.
                output.grad_fn.register_prehook(functools.partial(self._note, place))

    def evidence(self, parameters: Sequence[torch.Tensor]) -> bytes:
        """Return what the other ranks compare with theirs, or nothing if no comparison is due."""
        if not self.is_due:
            return b""
        total, norm = _total_and_norm(parameters) if self._asks else (0.0, 0.0)
        sharding = self._ranks.context.sharding
        digests = self._inputs, self._places, sharding.batch
        return _EVIDENCE.pack(*_Evidence(sharding.delivered, self._drew(), *digests, total, norm))

    def compare(self, packed: Sequence[bytes], parameters: Sequence[torch.Tensor]) -> None:
        """Judge what all ranks have returned from `evidence`, and begin anew.

        Parameters
        ----------
        packed : sequence of bytes
            By rank.
        parameters : sequence of torch.Tensor
            What is trained.
        """
        sharding = self._ranks.context.sharding
        if self.is_due:
            by_rank = [_Evidence(*_EVIDENCE.unpack(evidence)) for evidence in packed]
            self._same_data = self._delivers_same({evidence.batch for evidence in by_rank})
            sharding.undivided = self._same_data or _same(by_rank, sharding.undivided)
        elif sharding.delivered and not self._same_data:
            sharding.undivided = False
        self._repeated = self._repeated + 1 if sharding.undivided else 0
        if self._ranks.rank == 0 and (sharding.undivided or self.is_due):
            self._count(parameters)
        self._averagings += 1
        self._begin_anew()

    def _delivers_same(self, batches: set[int]) -> bool:
        """Whether all loaders have delivered one batch, and another one before: data may be constant."""
        batch = batches.pop() if len(batches) == 1 else 0
        before, self._batch = self._batch, batch
        return batch != 0 and before not in (0, batch)

    def _begin_anew(self) -> None:
        self._inputs = self._places = self._calls = 0
        self._states = process_states() if self.is_due and self._averagings else []
        sharding = self._ranks.context.sharding
        sharding.delivered, sharding.batch, sharding.compares_batches = False, 0, self.is_due
        if not self._expects_comparison:
            self._returned.clear()

    def _without_returned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor instead of one that a model has returned."""
        is_returned = tensor.layout is torch.strided and _memory(tensor).cdata in self._returned
        return torch.empty(0, dtype=tensor.dtype) if is_returned else tensor

    def _drew(self) -> bool:
        return not self._states or any(differing(self._states, process_states()))

    def _note(self, place: int, gradients: Any) -> None:
        rows = [
            gradient.detach().ne(0).unsqueeze(-1).flatten(1).any(1) for gradient in gradients if _has_rows(gradient)
        ]
        self._places = digest(self._places, place, rows) or 1

    def _count(self, parameters: Sequence[torch.Tensor]) -> None:
        """Warn once enough has been averaged; a single step is nothing to warn of."""
        sharding, place = self._ranks.context.sharding, users_place()
        if place is None or "undivided" in sharding.warnings_given or sharding.chosen:
            return
        line = place.filename, place.number
        _counts[line] = _counts.get(line, 0) + 1 if sharding.undivided else 0
        is_enough = (_counts[line] > FIRST or self._same_data) and self.is_due
        if is_enough and self._warn(place, parameters):
            sharding.warnings_given.add("undivided")

    def _warn(self, place: Place, parameters: Sequence[torch.Tensor]) -> bool:
        """Warn of the line once, and again where it trains another model for long; return whether that was the last."""
        got, hint = f"each of the {self._ranks.size} ranks computes the same batches", _ADVICE
        if self._same_data:
            got, hint = f"the loaders of all {self._ranks.size} ranks deliver the same batches", _INDEX
        message = error_message(got, _GAIN, hint)
        is_said = warn_once(message, place)
        is_long = self._repeated > FIRST
        if not is_said and is_long and not any(parameter in _warned_of for parameter in parameters[:1]):
            warn(message, place)
        is_said |= is_long
        for parameter in parameters[: int(is_said)]:
            _warned_of[parameter] = True
        return is_said


def _same(ranks: Sequence[_Evidence], before: bool) -> bool:
    """Whether it is shown that all ranks have computed the same; `before` if none has computed anything."""
    if any(evidence.delivered for evidence in ranks):
        return False
    if not any(evidence.norm for evidence in ranks):
        return before
    if all(_have_equal_gradients(evidence, ranks[0]) for evidence in ranks):
        return True
    if not any(evidence.drew for evidence in ranks):
        return False
    return ranks[0].places != 0 and len({(evidence.inputs, evidence.places) for evidence in ranks}) == 1


def _have_equal_gradients(one: _Evidence, other: _Evidence) -> bool:
    bound = _TOLERANCE * max(one.norm, other.norm)
    pairs = ((one.total, other.total), (one.norm, other.norm))
    return all(a == b or abs(a - b) <= bound or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _total_and_norm(parameters: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the sum of all gradients and their norm; each parameter counts with another factor."""
    total = norm = 0.0
    for factor, parameter in enumerate(parameters, start=1):
        sum_, length = sum_and_norm(parameter.grad)
        total, norm = total + factor * sum_, norm + factor * length
    return total, norm


def _has_rows(gradient: Any) -> bool:
    return isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided and gradient.dim() > 0
