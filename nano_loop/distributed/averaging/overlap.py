"""Averaging that begins while the backward still computes, between hosts, where gradients take long to travel.

When all parameters of a run have had a gradient in one backward, on all ranks, those of the next are taken as they
arrive, last ones first, and their means lie in separate memory until the backward ends. The ranks then agree on whether
the means are of use: not where a gradient was missing, came twice, or was changed after it had come. They are dropped
then, and the gradients, which nothing has changed, are averaged as usual. Where that is more than a rare exception, the
rest of the run is not overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from nano_loop.distributed.averaging.gradients import in_memory_order, is_plain
from nano_loop.distributed.transport.means import is_summed_wider
from nano_loop.distributed.transport.sweep import Sweep
from nano_loop.intercept.torch_private import foreach_copy, version

#: What a rank says of its sweep: it has begun none, a whole one, or one of no use.
NONE, WHOLE, SPOILED = range(3)
#: How many sweeps may be of no use, and one more for each so many that are.
_FEW, _RARE = 2, 10


class Sweeping(Protocol):
    """A transport that can take tensors as they arrive."""

    def sweep(self, targets: Sequence[torch.Tensor]) -> Sweep:
        """See `nano_loop.distributed.transport.hosts.HostsTransport.sweep`."""


class _Taken(NamedTuple):
    """A gradient that has arrived, as it was then."""

    gradient: torch.Tensor
    version: int


class Overlap:
    """The sweep of the backward that is under way.

    Parameters
    ----------
    transport : Sweeping
        Carries the gradients.
    """

    def __init__(self, transport: Sweeping) -> None:
        self._transport = transport
        self._parameters: list[torch.Tensor] = []  # in the order in which they are expected
        self._places: dict[int, int] = {}  # by the ids of parameters
        self._means: list[torch.Tensor] = []
        self._sweep: Sweep | None = None
        self._taken: dict[int, _Taken] = {}
        self._spoiled = False
        self._useful = self._useless = 0

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note which parameters will probably have a gradient in the next backward; none: do not overlap it.

        Called with the same ones on all ranks.
        """
        pays = self._useless <= _FEW + self._useful // _RARE
        if not pays or not parameters or any(is_summed_wider(each.dtype) for each in parameters):
            self._parameters, self._places, self._means = [], {}, []
            return
        expected = [each for each in reversed(parameters) if each.numel()]
        if len(expected) == len(self._parameters) and all(map(_is, expected, self._parameters)):
            return
        self._parameters, self._places = expected, {id(each): place for place, each in enumerate(expected)}
        self._means = [torch.empty_like(in_memory_order(each, each.detach())) for each in expected]

    def begin(self, *, allowed: bool) -> None:
        """Note that a backward begins, which may be overlapped."""
        if self._sweep is not None:
            self._spoiled = True  # of a backward that did not end
        elif allowed and self._parameters:
            self._start()

    def take(self, parameter: torch.Tensor) -> None:
        """Take the gradient that has arrived for a parameter."""
        place = self._places.get(id(parameter))
        if self._sweep is None or self._spoiled or place is None:
            return
        gradient = parameter.grad
        if gradient is None or place in self._taken or not is_plain(gradient, parameter):
            self._spoiled = True
            return
        self._taken[place] = _Taken(gradient, version(gradient))
        with torch.no_grad():
            self._sweep.arrived(place, in_memory_order(parameter, gradient))
            self._sweep.advance()

    @property
    def state(self) -> int:
        """What to tell the other ranks: NONE, WHOLE or SPOILED."""
        if self._sweep is None:
            return NONE
        return WHOLE if not self._spoiled and self._is_whole() else SPOILED

    def finish(self, states: Sequence[int]) -> bool:
        """End the sweep if any rank has begun one; return whether the gradients are means now. Collective.

        Parameters
        ----------
        states : sequence of int
            Those of all ranks.
        """
        if not any(states):
            return False
        if self._sweep is None:
            self._start()
        assert self._sweep is not None
        with torch.no_grad():
            for place, mean in enumerate(self._means):  # anything: the others wait for as many bytes
                if place not in self._taken:
                    self._sweep.arrived(place, mean)
            self._sweep.finish()
            is_mean = all(each == WHOLE for each in states)
            if is_mean:
                gradients = [self._taken[place].gradient for place in range(len(self._means))]
                pairs = zip(self._parameters, gradients, strict=True)
                foreach_copy([in_memory_order(each, gradient) for each, gradient in pairs], self._means)
        self._sweep, self._taken, self._spoiled = None, {}, False
        self._useful, self._useless = self._useful + is_mean, self._useless + (not is_mean)
        return is_mean

    def _start(self) -> None:
        self._sweep, self._taken, self._spoiled = self._transport.sweep(self._means), {}, False

    def _is_whole(self) -> bool:
        """Whether all gradients have arrived, and are what they were then."""
        if len(self._taken) < len(self._parameters):
            return False
        found = ((parameter.grad, self._taken[place]) for place, parameter in enumerate(self._parameters))
        return all(now is then.gradient and version(then.gradient) == then.version for now, then in found)


def _is(one: object, other: object) -> bool:
    return one is other
