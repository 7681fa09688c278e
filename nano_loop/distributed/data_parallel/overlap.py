"""Averaging that begins while the backward still computes, between hosts, where gradients take long to travel.

When all parameters of a run have had a gradient in one backward, on all ranks, those of the next are sent as they
arrive, last ones first, and their means lie in separate memory until the backward ends. The ranks then agree on whether
the means are of use: not where a gradient was missing, came twice, or was changed after it had come. They are dropped
then, and the gradients, which nothing has changed, are averaged as usual. Where that is more than a rare exception, the
rest of the run is not overlapped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from nano_loop.distributed.comm.packing import Signature, signature
from nano_loop.distributed.data_parallel.buckets import GroupTransport
from nano_loop.distributed.data_parallel.gradients import in_memory_order, is_plain
from nano_loop.patching.torch_private import version

#: What a rank says of the averaging: it has begun none, a whole one, or one of no use.
NONE, WHOLE, SPOILED = range(3)
#: How many may be of no use, and one more for each so many that are.
_MAX_USELESS, _USELESS_RATIO = 2, 10


class Overlap:
    """The averaging of the gradients of the current backward.

    Parameters
    ----------
    transport : GroupTransport or None
        Carries them; without one, nothing overlaps.
    """

    def __init__(self, transport: GroupTransport | None) -> None:
        self._transport: Any = transport
        self._parameters: dict[int, torch.Tensor] = {}  # by their ids, in the order in which they are averaged
        self._places: dict[int, int] = {}  # likewise
        self._signature: Signature = ((), ())
        self._has_begun = self._is_spoiled = False
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # gradients and their versions then, by parameter
        self._useful = self._useless = 0

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note which parameters will probably have a gradient in the next backward; none: do not overlap it.

        Called with the same ones on all ranks, in the order in which they are averaged.
        """
        if self._transport is None:
            return
        pays = self._useless <= _MAX_USELESS + self._useful // _USELESS_RATIO
        expected = {id(parameter): parameter for parameter in parameters if pays and parameter.numel()}
        if [*expected] != [*self._parameters]:
            self._parameters, self._places = expected, {key: place for place, key in enumerate(expected)}
            self._signature = signature(
                [in_memory_order(parameter, parameter.detach()) for parameter in expected.values()]
            )

    def start(self, *, allowed: bool) -> None:
        """Note that a backward begins, which may be overlapped."""
        if self._has_begun:
            self._is_spoiled = True  # by a backward that did not end
        elif allowed and self._parameters:
            self._begin()

    def send(self, parameter: torch.Tensor) -> None:
        """Send the gradient that has arrived for a parameter."""
        key, gradient = id(parameter), parameter.grad
        if not self._has_begun or self._is_spoiled or key not in self._parameters:
            return
        if gradient is None or key in self._sent or not is_plain(gradient, parameter):
            self._is_spoiled = True
            return
        elements, place = in_memory_order(parameter, gradient), self._places[key]
        shapes, dtypes = self._signature
        if elements.shape != shapes[place] or elements.dtype is not dtypes[place]:  # the loop has converted the model
            self._is_spoiled = True
            return
        self._sent[key] = gradient, version(gradient)
        self._transport.add(place, elements)

    @property
    def state(self) -> int:
        """What to tell the other ranks: NONE, WHOLE or SPOILED."""
        if not self._has_begun:
            return NONE
        return SPOILED if self._is_spoiled or not all(map(self._is_as_sent, self._parameters)) else WHOLE

    def finish(self, states: Sequence[int]) -> Collection[int]:
        """End the averaging if any rank has begun one; return the ids of what has its mean now. Collective.

        Parameters
        ----------
        states : sequence of int
            Those of all ranks.
        """
        if not any(states):
            return ()
        if not self._has_begun:
            self._begin()
        self._transport.finish()
        is_mean = all(state == WHOLE for state in states)
        if is_mean:
            pairs = ((parameter, self._sent[key][0]) for key, parameter in self._parameters.items())
            self._transport.write([in_memory_order(*pair) for pair in pairs])
        else:
            self._parameters = {}  # `expect` looks at shapes and dtypes again
        self._has_begun, self._sent, self._is_spoiled = False, {}, False
        self._useful, self._useless = self._useful + is_mean, self._useless + (not is_mean)
        return self._parameters.keys()

    def _begin(self) -> None:
        self._transport.begin(self._signature)
        self._has_begun = True

    def _is_as_sent(self, key: int) -> bool:
        """Whether the gradient of a parameter was sent, and is what it was then."""
        gradient, then = self._sent.get(key, (None, 0))
        return gradient is not None and gradient is self._parameters[key].grad and version(gradient) == then
