"""What a rank reports of its state before each averaging, so that diverged ranks are found at once."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from nano_loop.errors import NanoWorkerError, error_message

#: What arrived for a parameter since the last averaging.
NOTHING, DENSE, SPARSE = range(3)

#: To average gradients, or to make equal what the loop has added to a model.
Purpose = Literal["average", "sync"]

#: The purpose, averagings, steps, added parameters, overlap, learning rates, and the checksum of gradients.
_COUNTS = struct.Struct("<7s5q2d")
_PLACES = {"average": "ended a backward", "sync": "called a model with added parameters"}
_MAY_DIFFER: dict[str, Any] = {"arrived": b"", "gradients": (0.0, 0.0), "overlap": 0}
_ADVICE = "Make the loop do the same on every rank; only printing, saving and evaluating may differ"


@dataclass(frozen=True)
class Fingerprint:
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
        The checksum of `nano_loop.distributed.data_parallel.duplicate_work`; zeros where it is not compared.
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
        purpose = self.purpose.encode()
        states = self.averagings, self.steps, self.added_parameters, self.overlap
        counts = _COUNTS.pack(purpose, *states, len(self.rates), *self.gradients)
        rates = struct.pack(f"<{len(self.rates)}d", *self.rates)
        return b"".join([counts, rates, self.arrived])

    @classmethod
    def unpack(cls, content: bytes) -> Fingerprint:
        """Make one from what `pack` returned."""
        purpose, averagings, steps, added, overlap, count, total, norm = _COUNTS.unpack_from(content)
        rates = struct.unpack_from(f"<{count}d", content, _COUNTS.size)
        arrived = content[_COUNTS.size + 8 * count :]
        name: Any = purpose.rstrip(b"\0").decode()
        return cls(name, averagings, steps, added, rates, arrived, (total, norm), overlap)


def refuse_divergence(fingerprints: list[Fingerprint]) -> None:
    """Raise a `NanoWorkerError` that names what differs, and on which ranks, if `fingerprints` are of diverged ranks.

    What arrived, gradients and the overlap may differ. NaN equals NaN.
    """
    if all(_agree(fingerprint, fingerprints[0]) for fingerprint in fingerprints):
        return
    at = f"at step {fingerprints[0].steps}"
    _refuse("the ranks have taken different numbers of steps", fingerprints, lambda fingerprint: f"{fingerprint.steps}")
    _refuse(f"learning rates differ {at}", fingerprints, lambda fingerprint: f"{list(fingerprint.rates)}")
    _refuse(f"numbers of parameters differ {at}", fingerprints, lambda fingerprint: f"{len(fingerprint.arrived)}")
    _refuse(
        f"numbers of added parameters and buffers differ {at}",
        fingerprints,
        lambda fingerprint: f"{fingerprint.added_parameters}",
    )
    _refuse(f"ranks are not at the same place {at}", fingerprints, lambda fingerprint: _PLACES[fingerprint.purpose])
    _refuse(f"numbers of backwards differ {at}", fingerprints, lambda fingerprint: f"{fingerprint.averagings}")


def _agree(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two are the same where they must be; never of those with NaN, which `_refuse` compares as text."""
    counts = [replace(fingerprint, **_MAY_DIFFER) for fingerprint in (one, other)]
    return counts[0] == counts[1] and len(one.arrived) == len(other.arrived)


def _refuse(what: str, fingerprints: list[Fingerprint], value_of: Callable[[Fingerprint], Any]) -> None:
    """Raise if `value_of` differs between the fingerprints."""
    ranks: dict[str, list[int]] = {}
    for rank, fingerprint in enumerate(fingerprints):
        ranks.setdefault(value_of(fingerprint), []).append(rank)
    if len(ranks) > 1:
        values = ", ".join(f"{_those(some)} {value}" for value, some in ranks.items())
        other = list(ranks.values())[1][0]  # the first that is not like rank 0
        raise NanoWorkerError(
            error_message(f"{what}: {values}", "all ranks must take the same steps", _ADVICE), rank=other
        )


def _those(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
