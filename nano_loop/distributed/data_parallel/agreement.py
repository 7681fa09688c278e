"""What ranks agree on before and after an averaging: that they are at the same place, with the same parameters."""

from __future__ import annotations

import math
from typing import Any

import torch

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel import checksums
from nano_loop.distributed.data_parallel.comparison import Comparison
from nano_loop.distributed.data_parallel.fingerprint import NOTHING, Fingerprint, Purpose, refuse_divergence
from nano_loop.distributed.data_parallel.gradients import AveragedGradients, kind_of
from nano_loop.distributed.data_parallel.initial_sync import make_equal
from nano_loop.distributed.data_parallel.overlap import NONE
from nano_loop.distributed.data_parallel.parameters import Parameters


class Agreement:
    """How far this rank is, which has to be as far as the others.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    parameters : Parameters
        What is averaged.
    compare : bool
        Whether the ranks compare their parameters and buffers from time to time; see `checksums`.

    Attributes
    ----------
    averagings, steps : int
        How many averagings there have been, and how many steps of optimizers.
    """

    def __init__(self, ranks: Ranks, parameters: Parameters, *, compare: bool) -> None:
        self._ranks = ranks
        self._parameters = parameters
        self._comparison = Comparison(ranks, compare)
        self.averagings = 0
        self.steps = 0

    def exchange(self, purpose: Purpose, waiting: set[int], overlap: int = NONE) -> list[Fingerprint]:
        """Return the fingerprints of all ranks; raise a NanoError on each if they have diverged. Collective.

        Parameters
        ----------
        purpose : {"average", "sync"}
            What comes next.
        waiting : set of int
            The ids of the parameters whose gradients wait on this rank.
        overlap : int
            The state of `Overlap`.
        """
        compares_work = purpose == "average" and checksums.is_due(self.averagings)
        groups = [group for optimizer in self._parameters.optimizers for group in optimizer.param_groups]
        in_order = self._parameters.in_order
        own_fingerprint = Fingerprint(
            purpose,
            averagings=self.averagings,
            steps=self.steps,
            added_parameters=len(self._parameters.added_parameters),
            rates=tuple(_as_number(group.get("lr")) for group in groups),
            arrived=bytes([kind_of(parameter.grad) if id(parameter) in waiting else NOTHING for parameter in in_order]),
            gradients=checksums.gradient_checksum(in_order) if compares_work else (0.0, 0.0),
            overlap=overlap,
        )
        packed = self._ranks.channel.gather(own_fingerprint.pack(), AVERAGING)
        fingerprints = [Fingerprint.unpack(fingerprint) for fingerprint in packed]
        refuse_divergence(fingerprints)
        if compares_work:
            self._comparison.of_work([fingerprint.gradients for fingerprint in fingerprints], self.averagings)
        return fingerprints

    def sync_added_parameters(self) -> None:
        """Give parameters that the loop has added rank 0's values. Collective if there are any."""
        self._parameters.refresh()
        if self._parameters.added_parameters:
            self.exchange("sync", set())
            make_equal(self._ranks, self._parameters.added_parameters)
            self._parameters.are_equal()

    def end_averaging(self) -> None:
        """Note that gradients have been averaged, and compare parameters and buffers. Collective."""
        self._comparison.after(self.averagings, self._parameters)
        self.averagings += 1
        for function in self._ranks.context.after_averaging:
            function(self.averagings)

    def compare_rest(self, averaged: AveragedGradients) -> None:
        """Compare, at the end of the run, the parameters whose gradients were never averaged; see `Comparison`."""
        self._comparison.of_rest(self._parameters, averaged)


def _as_number(rate: Any) -> float:
    """Return a learning rate as a number; NaN where a group has none."""
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) else math.nan
