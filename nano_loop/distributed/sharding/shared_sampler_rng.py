"""Lets samplers draw the same numbers on every rank, without changing each rank's own random states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from nano_loop.data.random_states import (
    differing,
    generator_state,
    process_states,
    set_generator_state,
    set_process_states,
)
from nano_loop.distributed.comm.ranks import ITERATION, Ranks

Value = TypeVar("Value")


class AgreedState:
    """Rank 0's random states of the process and of generators, which advance separately from each rank's own."""

    def __init__(self, ranks: Ranks, generators: list[Any]) -> None:
        self._ranks = ranks
        self._generators = generators
        self._states: list[Any] = []

    def agree(self) -> None:
        """Copy rank 0's current states. Collective."""
        own_states = ([], []) if self._ranks.rank else (process_states(), [*map(generator_state, self._generators)])
        self._states, of_generators = self._ranks.broadcast(own_states, what=ITERATION)
        if self._ranks.rank:
            for generator, state in zip(self._generators, of_generators, strict=False):
                set_generator_state(generator, state)

    def call(self, function: Callable[..., Value], *args: Any) -> Value:
        """Call `function` with the agreed states, which advance, as do the rank's own states that were equal."""
        own = process_states()
        apart = differing(own, self._states)
        set_process_states(self._states, apart)
        try:
            return function(*args)
        finally:
            self._states = process_states()
            set_process_states(own, apart)


class AgreedItems:
    """The items of a sampler, the same on every rank; its generators are synchronized."""

    def __init__(self, sampler: Any, ranks: Ranks, generators: list[Any]) -> None:
        self._state = AgreedState(ranks, generators)
        self._draws_later = not _draws_at_first_only(sampler)
        self._begun = False
        if self._draws_later:
            self._state.agree()
            self._items = self._state.call(iter, sampler)
        else:
            self._items = iter(sampler)

    def take(self, count: int) -> list[Any]:
        """Return the next `count` items, or fewer at the end, without reading ahead."""
        if not self._begun:
            self._state.agree()  # also after `iter`, since torch draws a seed for its workers in between
        agreed = self._draws_later or not self._begun
        self._begun = True
        return self._state.call(self._take, count) if agreed else self._take(count)

    def _take(self, count: int) -> list[Any]:
        # A sampler may reuse the list that it yielded.
        return [item.copy() if type(item) is list else item for item in itertools.islice(self._items, count)]


_OF_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, SequentialSampler, list, tuple, range)


def _draws_at_first_only(sampler: Any) -> bool:
    """Whether a sampler draws from the process's generators at its first item or never; a subclass may at any item."""
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) in _OF_TORCH
