"""The random states of samplers: those of the process, and those of generator objects."""

from __future__ import annotations

import itertools
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.patching.walk import walk


class _Kind(NamedTuple):
    """A random state of the process."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    seed: Callable[[int], Any]


def _same_in_numpy(one: Any, other: Any) -> bool:
    return one[0] == other[0] and one[2:] == other[2:] and np.array_equal(one[1], other[1])


_KINDS = (
    _Kind(torch.get_rng_state, torch.set_rng_state, torch.equal, torch.default_generator.manual_seed),
    _Kind(random.getstate, random.setstate, lambda one, other: one == other, random.seed),
    _Kind(np.random.get_state, np.random.set_state, _same_in_numpy, lambda seed: np.random.seed(seed % (1 << 32))),
)


def process_states() -> list[Any]:
    """Return the states of `torch`, `random` and `numpy.random`."""
    return [kind.get() for kind in _KINDS]


def checksum_of_libraries() -> int:
    """Return a checksum of the states of `random` and `numpy.random`."""
    _, *states = process_states()
    return zlib.crc32(pickle.dumps(states))


def set_process_states(states: list[Any], which: list[bool]) -> None:
    """Set the states for which `which` is true."""
    for kind, state in itertools.compress(zip(_KINDS, states, strict=True), which):
        kind.set(state)


def diverge_rng(ranks: Ranks) -> None:
    """Make this rank draw different random numbers than rank 0 from now on. Only the first call in a run has an effect.

    Ranks begin with the states of rank 0, so that random splits and weights are the same. They diverge at the loop's
    first batch, since dropout and noise must differ, unless they share each batch, or the loop has seeded torch itself.
    """
    if ranks.context.common_seed is None or ranks.context.split is not None:
        return
    seeded_by_loop = ranks.context.common_seed != torch.initial_seed()
    ranks.context.common_seed = None
    if ranks.rank and not seeded_by_loop:
        reseed(ranks.rank)


def reseed(rank: int) -> None:
    """Set the random states of the process to states derived from the current ones and the rank."""
    for kind in _KINDS:
        state = kind.get()
        parts = state if isinstance(state, tuple) else [state]
        numbers = [part.tolist() if isinstance(part, (torch.Tensor, np.ndarray)) else part for part in parts]
        kind.seed(int.from_bytes(sha256(repr([numbers, rank]).encode()).digest()[:8], "little"))


def differing(states: list[Any], others: list[Any]) -> list[bool]:
    """Return which states differ."""
    return [not kind.same(one, other) for kind, one, other in zip(_KINDS, states, others, strict=True)]


#: The classes of generator objects.
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def generators_of(*holders: Any) -> list[Any]:
    """Return the generator objects in the attributes of samplers or loaders and of the samplers inside them."""
    return [value for value in walk(holders, _held_by_sampler) if _has_state(value)]


def _held_by_sampler(holder: Any) -> Iterator[Any]:
    for name, value in getattr(holder, "__dict__", {}).items():
        if name in ("batch_sampler", "sampler") or _has_state(value):
            yield value


def generator_state(generator: Any) -> Any:
    """Return the state of a generator object."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a generator object to the state of a generator of the same kind."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _has_state(value: Any) -> bool:
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)
