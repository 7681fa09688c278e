"""The ranks' agreement before and after averaging: they are at the same place, and their parameters are equal."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Literal, NamedTuple

import torch
from torch import nn

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.packing import Signature, signature
from nano_loop.distributed.comm.ranks import Loop, Ranks
from nano_loop.distributed.comm.split_batches import random_state
from nano_loop.distributed.data_parallel import checksums
from nano_loop.distributed.data_parallel.buckets import NONE
from nano_loop.distributed.data_parallel.gradients import AveragedGradients
from nano_loop.distributed.data_parallel.initial_sync import Named, make_equal, named_buffers
from nano_loop.distributed.data_parallel.parameters import Parameters
from nano_loop.distributed.data_parallel.sample_weights import Weight
from nano_loop.errors import NanoWorkerError, RankLateError, RankLeftError, error_message
from nano_loop.patching.members import buffers_of
from nano_loop.patching.user_code import warn, warn_once

_BUFFER = "a call changes it by its rank's batch, and rank 0's is kept"
_MEAN = "Set it to nano_loop.all_reduce(value), the mean of all ranks, in the call"
_GAIN = "several processes gain nothing, and auto_lr leaves the rate at 1×"
_DIVIDE = (
    "Iterate a DataLoader in train mode, or one that setup_dataloaders(loader, shard=True) has set up, whose dataset "
    "returns the rows of the index. Or take other batches on each rank, such as "
    "x[nano_loop.global_rank()::nano_loop.world_size()]. Otherwise omit num_processes"
)
_DRAW = "Numbers that are drawn must not depend on a rank's own values: draw one for each sample, and select after that"
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


#: Average gradients, equalize what the loop has added to a model, or only average losses.
Purpose = Literal["average", "sync", "losses"]

_PLACES = {
    "average": "ended a backward",
    "sync": "called a model with added parameters",
    "losses": "ended a backward without averaging",
}
_ADVICE = "Make the loop do the same on every rank; only printing, saving and evaluating may differ"


class Fingerprint(NamedTuple):
    """One rank's state just before a collective operation."""

    purpose: Purpose
    averagings: int
    steps: int  # the total number of steps of all optimizers
    added_parameters: int  # the number of added parameters and buffers that are not equal on all ranks yet
    shapes: int  # a checksum of the shapes and dtypes of all parameters, if gradients are averaged
    rates: tuple[float, ...]  # the learning rates of all groups of all optimizers; NaN for a group without one
    arrived: bytes  # one of NOTHING, DENSE and SPARSE for each parameter
    gradients: tuple[float, float] = (0.0, 0.0)  # `checksums.gradient_checksum`; zeros if it is not compared
    overlap: int = 0  # the state of `buckets.Overlap`
    losses: tuple[float, ...] = ()  # `roots.WeightedRoots.values`, if ranks share a batch
    weights: tuple[Weight, ...] = ()  # `SampleWeights.take`, likewise
    random_state: int = 0  # a checksum of the state of torch's default generator, if ranks share a batch
    batches: int = 0  # a checksum of all batches so far, if ranks share them
    #: Whether the state is unchanged since the batch came, and the ranks have not checked yet that all are equal.
    is_undrawn: bool = False
    is_posted: bool = False  # whether the other ranks can read all gradients already; see `SharedMemoryTransport.post`


def refuse_divergence(fingerprints: list[Fingerprint], loop: Loop | None = None) -> None:
    """Raise a `NanoWorkerError` that names what differs, and between which ranks, if ranks of a loop have diverged."""
    if len({(repr(one.rates), len(one.arrived), *_COUNTS(one)) for one in fingerprints}) == 1:
        return
    for what, value_of in _WORDS:
        ranks: dict[str, list[int]] = {}
        for rank, fingerprint in enumerate(fingerprints):
            ranks.setdefault(str(value_of(fingerprint)), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(
                f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))} {'has' if len(some) == 1 else 'have'} {value}"
                for value, some in ranks.items()
            )
            other = list(ranks.values())[1][0]  # the first one that differs from rank 0
            got = f"{what.format(step=fingerprints[0].steps)}: {values}"
            _, agree = (loop or Loop()).same_steps
            advice = f"{_ADVICE}. {_DRAW if what.startswith('states') else agree}"
            raise NanoWorkerError(error_message(got, "all ranks must take the same steps", advice), rank=other)


_COUNTS = attrgetter("purpose", "averagings", "steps", "added_parameters", "shapes", "random_state", "batches")

#: What must be equal, in words, in the order of the checks.
_WORDS: tuple[tuple[str, Callable[[Fingerprint], object]], ...] = (
    ("the ranks have taken different numbers of steps", lambda one: one.steps),
    ("learning rates differ at step {step}", lambda one: [*one.rates]),
    ("numbers of parameters differ at step {step}", lambda one: len(one.arrived)),
    ("numbers of added parameters and buffers differ at step {step}", lambda one: one.added_parameters),
    ("ranks are not at the same place at step {step}", lambda one: _PLACES[one.purpose]),
    ("numbers of backwards differ at step {step}", lambda one: one.averagings),
    ("shapes or dtypes of parameters differ at step {step}", lambda one: f"those with the checksum {one.shapes:08x}"),
    ("batches differ at step {step}", lambda one: f"some with the checksum {one.batches:08x}"),
    ("states of torch's generator differ at step {step}", lambda one: f"one with the checksum {one.random_state:08x}"),
)


class Agreement:
    """Progress of this rank, which must equal the others'; with `compare`, they compare `checksums` at intervals."""

    def __init__(self, ranks: Ranks, parameters: Parameters, *, compare: bool) -> None:
        self._ranks = ranks
        self._parameters = parameters
        self._compares = compare
        self._buffers_differ = False  # whether the warning was issued
        self._shapes: tuple[Signature, int] = (((), ()), 0)  # shapes and dtypes of all parameters, and their checksum
        self.averagings = 0
        self.steps = 0  # of all optimizers

    def exchange(
        self,
        purpose: Purpose,
        arrived: bytes,
        overlap: int = NONE,
        losses: tuple[float, ...] = (),
        weights: tuple[Weight, ...] = (),
        *,
        is_posted: bool = False,
    ) -> list[Fingerprint]:
        """Return the fingerprints of all ranks; raise a NanoError on each if they have diverged. Collective."""
        compares_work = purpose == "average" and checksums.is_due(self.averagings)
        in_order, split = self._parameters.in_order, self._ranks.context.split
        own_fingerprint = Fingerprint(
            purpose,
            averagings=self.averagings,
            steps=self.steps,
            added_parameters=len(self._parameters.added_parameters),
            shapes=self._checksum_of_shapes() if purpose == "average" else 0,
            rates=checksums.rates_of(self._parameters.optimizers),
            arrived=arrived,
            gradients=checksums.gradient_checksum(in_order) if compares_work else (0.0, 0.0),
            overlap=overlap,
            losses=losses,
            weights=weights,
            random_state=(state := 0 if split is None else random_state()),
            batches=0 if split is None else split.checksum,
            is_undrawn=split is not None and split.unequal_since == state,
            is_posted=is_posted,
        )
        packed = self._ranks.channel.exchange(pickle.dumps(own_fingerprint), AVERAGING)
        fingerprints: list[Fingerprint] = [*map(pickle.loads, packed)]
        if split is not None and all(fingerprint.is_undrawn for fingerprint in fingerprints):
            self._ranks.equalize_random_states(AVERAGING, [fingerprint.random_state for fingerprint in fingerprints])
            fingerprints = [one._replace(random_state=fingerprints[0].random_state) for one in fingerprints]
        refuse_divergence(fingerprints, self._ranks.context.loop)
        if compares_work:
            self._note_work([fingerprint.gradients for fingerprint in fingerprints])
        return fingerprints

    def sync_added_parameters(self) -> None:
        """Set added parameters that `Parameters.refresh` has found to rank 0's. Collective if there are any."""
        if self._parameters.added_parameters:
            self.exchange("sync", self._parameters.arrived(set()))
            make_equal(self._ranks, self._parameters.added_parameters)
            self._parameters.are_equal()

    def end_averaging(self) -> None:
        """Record an averaging, and refuse parameters that differ after some of them. Collective."""
        if self._compares and checksums.is_due(self.averagings):
            named = self._parameters.named
            checksums.refuse_unequal(self._gathered(named), named)
            self._compare_buffers()
        self.averagings += 1
        for function in self._ranks.context.after_averaging:
            function(self.averagings)

    def compare_rest(self, averaged: AveragedGradients) -> None:
        """At the end, compare parameters that were never averaged, as with `torch.autograd.grad`. Collective."""
        rest = [pair for pair in self._parameters.named if pair[1].requires_grad and pair[1] not in averaged]
        if rest and self._compares:
            with suppress(RankLeftError, RankLateError):
                checksums.refuse_unequal(self._gathered(rest), rest)

    def _compare_buffers(self) -> None:
        if self._buffers_differ:
            return
        buffers = _compared_buffers(self._parameters.models, () if self._ranks.context.split else _NORMS)
        unequal = checksums.first_unequal(self._gathered(buffers), buffers)
        self._buffers_differ = unequal is not None
        if unequal is not None and self._ranks.rank == 0:
            warn(error_message(f"the buffer {unequal[0]} is no longer the same on all ranks", _BUFFER, _MEAN))

    def _note_work(self, gradients: Sequence[tuple[float, float]]) -> None:
        """Record in ``ranks.context.sharding`` whether all ranks compute the same; warn once if this continues."""
        sharding = self._ranks.context.sharding
        if any(norm for _, norm in gradients):  # otherwise the ranks have computed nothing
            sharding.undivided = all(checksums.are_equal(one, gradients[0], torch.float32) for one in gradients)
        # Do not warn after a few steps.
        is_split = self._ranks.context.split is not None and self._ranks.context.split.share is not None
        if sharding.undivided and not is_split and self.averagings >= checksums.FIRST and self._ranks.rank == 0:
            got = f"each of the {self._ranks.size} ranks computes the same batches"
            warn_once(error_message(got, _GAIN, _DIVIDE))

    def _checksum_of_shapes(self) -> int:
        shapes = signature(self._parameters.in_order)
        if shapes != self._shapes[0]:
            self._shapes = shapes, zlib.crc32(repr(shapes).encode())
        return self._shapes[1]

    def _gathered(self, named: Sequence[Named]) -> list[list[checksums.Pair]]:
        """Return the checksums of all ranks."""
        return self._ranks.gather(checksums.checksums(tensor for _, tensor in named), AVERAGING)


def _compared_buffers(models: Sequence[nn.Module], norms: tuple[type[nn.Module], ...]) -> list[Named]:
    """Return the buffers that must be equal: strided ones in checkpoints, but for running statistics of `norms`."""
    saved = {id(tensor) for model in models for tensor in nn.Module.state_dict(model, keep_vars=True).values()}
    of_norms = {
        id(buffer)
        for model in models
        for module in model.modules()
        if isinstance(module, norms)
        for buffer in buffers_of(module, recurse=False)
    }
    return [
        (name, buffer)
        for name, buffer in named_buffers(models)
        if id(buffer) in saved - of_norms and buffer.layout is torch.strided and not buffer.is_quantized
    ]
