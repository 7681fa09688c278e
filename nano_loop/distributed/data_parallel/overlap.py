"""Averaging that begins while the backward still computes, between hosts, where gradients take long to travel.

When all parameters of a run have had a gradient in one backward, on all ranks, those of the next are sent as they
arrive, last ones first, and their means lie in separate memory until the backward ends. The ranks then agree on whether
the means are of use: not where a gradient was missing, came twice, or was changed after it had come. They are dropped
then, and the gradients, which nothing has changed, are averaged as usual. Where that is more than a rare exception, the
rest of the run is not overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nano_loop.distributed.data_parallel.gradients import in_memory_order, is_plain
from nano_loop.distributed.shared_memory.shared_memory import Stream
from nano_loop.patching.torch_private import foreach_copy, version

#: What a rank says of its stream: it has begun none, a whole one, or one of no use.
NONE, WHOLE, SPOILED = range(3)
#: How many streams may be of no use, and one more for each so many that are.
_FEW, _RARE = 2, 10


class Overlap:
    """The stream of gradients of the current backward.

    Parameters
    ----------
    begin : callable
        Begins a stream; see `nano_loop.distributed.multi_host.hosts.HostsTransport.stream`.
    """

    def __init__(self, begin: Callable[[Sequence[torch.Tensor]], Stream]) -> None:
        self._begin = begin
        self._parameters: dict[int, torch.Tensor] = {}  # by their ids, in the order in which they are averaged
        self._places: dict[int, int] = {}  # likewise
        self._means: list[torch.Tensor] = []
        self._stream: Stream | None = None
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # gradients and their versions then, likewise
        self._spoiled = False
        self._useful = self._useless = 0

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note which parameters will probably have a gradient in the next backward; none: do not overlap it.

        Called with the same ones on all ranks, in the order in which they are averaged.
        """
        pays = self._useless <= _FEW + self._useful // _RARE
        expected = {id(parameter): parameter for parameter in parameters if pays and parameter.numel()}
        if [*expected] != [*self._parameters]:
            self._parameters, self._places = expected, {key: place for place, key in enumerate(expected)}
            parameters = [*expected.values()]
            self._means = [torch.empty_like(in_memory_order(tensor, tensor.detach())) for tensor in parameters]

    def start(self, *, allowed: bool) -> None:
        """Note that a backward begins, which may be overlapped."""
        if self._stream is not None:
            self._spoiled = True  # of a backward that did not end
        elif allowed and self._parameters:
            self._stream = self._begin(self._means)

    def send(self, parameter: torch.Tensor) -> None:
        """Send the gradient that has arrived for a parameter."""
        key, gradient = id(parameter), parameter.grad
        if self._stream is None or self._spoiled or key not in self._parameters:
            return
        if gradient is None or key in self._sent or not is_plain(gradient, parameter):
            self._spoiled = True
            return
        elements, mean = in_memory_order(parameter, gradient), self._means[self._places[key]]
        if elements.shape != mean.shape or elements.dtype is not mean.dtype:  # the loop has converted the model
            self._spoiled = True
            return
        self._sent[key] = gradient, version(gradient)
        self._stream.add(self._places[key], elements)

    @property
    def state(self) -> int:
        """What to tell the other ranks: NONE, WHOLE or SPOILED."""
        if self._stream is None:
            return NONE
        return SPOILED if self._spoiled or not all(map(self._is_as_sent, self._parameters)) else WHOLE

    def finish(self, states: Sequence[int]) -> bool:
        """End the stream if any rank has begun one; return whether the gradients are means now. Collective.

        Parameters
        ----------
        states : sequence of int
            Those of all ranks.
        """
        if not any(states):
            return False
        stream = self._stream or self._begin(self._means)
        for key, mean in zip(self._parameters, self._means, strict=True):
            if key not in self._sent:
                stream.add(self._places[key], mean)  # anything: the others wait for as many bytes
        stream.finish()
        is_mean = all(state == WHOLE for state in states)
        if is_mean:
            with torch.no_grad():
                pairs = ((parameter, self._sent[key][0]) for key, parameter in self._parameters.items())
                foreach_copy([in_memory_order(*pair) for pair in pairs], self._means)
        else:
            self._parameters = {}  # `expect` makes the memory for means again
        self._stream, self._sent, self._spoiled = None, {}, False
        self._useful, self._useless = self._useful + is_mean, self._useless + (not is_mean)
        return is_mean

    def _is_as_sent(self, key: int) -> bool:
        """Whether the gradient of a parameter was sent, and is what it was then."""
        gradient, then = self._sent.get(key, (None, 0))
        return gradient is not None and gradient is self._parameters[key].grad and version(gradient) == then
