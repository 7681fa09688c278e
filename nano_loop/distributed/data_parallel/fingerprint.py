"""What a rank reports of its state before each averaging, so that diverged ranks are found at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Literal, NamedTuple

from nano_loop.errors import NanoWorkerError, error_message

#: What arrived for a parameter since the last averaging.
NOTHING, DENSE, SPARSE = range(3)

#: To average gradients, or to make equal what the loop has added to a model.
Purpose = Literal["average", "sync"]

_PLACES = {"average": "ended a backward", "sync": "called a model with added parameters"}
_ADVICE = "Make the loop do the same on every rank; only printing, saving and evaluating may differ"


class Fingerprint(NamedTuple):
    """One rank's state just before a collective operation.

    Parameters
    ----------
    purpose : {"average", "sync"}
        The operation.
    averagings : int
        How many there have been.
    steps : int
        How many steps the optimizers have taken together.
    added_parameters : int
        How many parameters and buffers were added that are not equal on all ranks yet.
    rates : tuple of float
        The learning rates of all groups of all optimizers; NaN for a group without one.
    arrived : bytes
        One of NOTHING, DENSE and SPARSE for each parameter.
    gradients : (float, float)
        The `nano_loop.distributed.data_parallel.checksums.gradient_checksum`; zeros where it is not compared.
    overlap : int
        The state of `nano_loop.distributed.data_parallel.overlap`.
    """

    purpose: Purpose
    averagings: int
    steps: int
    added_parameters: int
    rates: tuple[float, ...]
    arrived: bytes
    gradients: tuple[float, float] = (0.0, 0.0)
    overlap: int = 0

    def pack(self) -> bytes:
        """Return it as bytes."""
        return pickle.dumps(tuple(self))

    @classmethod
    def unpack(cls, content: bytes) -> Fingerprint:
        """Make one from what `pack` returned."""
        return cls(*pickle.loads(content))


def refuse_divergence(fingerprints: list[Fingerprint]) -> None:
    """Raise a `NanoWorkerError` that names what differs, and on which ranks, if `fingerprints` are of diverged ranks.

    What arrived, gradients and the overlap may differ. NaN equals NaN.
    """
    if len({_compared(fingerprint) for fingerprint in fingerprints}) == 1:
        return
    for what, value_of in _WORDS:
        ranks: dict[str, list[int]] = {}
        for rank, fingerprint in enumerate(fingerprints):
            ranks.setdefault(str(value_of(fingerprint)), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{_those(some)} {value}" for value, some in ranks.items())
            other = list(ranks.values())[1][0]  # the first that is not like rank 0
            got = f"{what.format(step=fingerprints[0].steps)}: {values}"
            raise NanoWorkerError(error_message(got, "all ranks must take the same steps", _ADVICE), rank=other)


def _compared(one: Fingerprint) -> tuple[object, ...]:
    return one.purpose, one.averagings, one.steps, one.added_parameters, repr(one.rates), len(one.arrived)


#: What has to be the same, in words, in the order in which it is looked at.
_WORDS: tuple[tuple[str, Callable[[Fingerprint], object]], ...] = (
    ("the ranks have taken different numbers of steps", lambda one: one.steps),
    ("learning rates differ at step {step}", lambda one: [*one.rates]),
    ("numbers of parameters differ at step {step}", lambda one: len(one.arrived)),
    ("numbers of added parameters and buffers differ at step {step}", lambda one: one.added_parameters),
    ("ranks are not at the same place at step {step}", lambda one: _PLACES[one.purpose]),
    ("numbers of backwards differ at step {step}", lambda one: one.averagings),
)


def _those(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
