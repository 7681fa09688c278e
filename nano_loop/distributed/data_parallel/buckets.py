"""Gradients between hosts travel in buckets, while the backward still computes, as with `DistributedDataParallel`.

When all parameters of a run have had a gradient in one backward, on all ranks, those of the next are sent as they
arrive, last ones first, and their means lie in separate memory until the backward ends. The ranks then agree on whether
the means are of use: not where a gradient was missing, came twice, or was changed after it had come. They are dropped
then, and the gradients, which nothing has changed, are averaged as usual. Where that is more than a rare exception, the
rest of the run is not overlapped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import distributed

from nano_loop.distributed.comm.averaging_math import divide, is_summed_wider
from nano_loop.distributed.comm.packing import Batch, Places, Signature, pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.gradients import in_memory_order, is_plain
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.torch_private import version

#: What a rank says of the averaging: it has begun none, a whole one, or one of no use.
NONE, WHOLE, SPOILED = range(3)
#: How many may be of no use, and one more for each so many that are.
_MAX_USELESS, _USELESS_RATIO = 2, 10

_CAPACITY = 25 << 20  # bytes of a bucket


class _Plan(NamedTuple):
    """How a list is packed, and the buckets that each of its tensors has a part in."""

    batches: list[Batch]
    buckets_of: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def _plan(signature: Signature, capacity: int) -> _Plan:
    batches = pack(signature, capacity)
    buckets_of: list[list[int]] = [[] for _ in signature[0]]
    for number, batch in enumerate(batches):
        for piece in batch.pieces:
            buckets_of[piece.index].append(number)
    return _Plan(batches, tuple(map(tuple, buckets_of)))


class GroupTransport:
    """Averages over a process group. A bucket travels as soon as its tensors and the buckets before it are there.

    Elements of 16 bits travel and are summed in float32.

    Parameters
    ----------
    ranks : Ranks
        All ranks, with a default process group between them.
    group : torch.distributed.ProcessGroup, optional
        One that carries nothing else, for lists that travel while values do; by default, the default group.
    capacity : int
        Bytes of a bucket.
    """

    def __init__(self, ranks: Ranks, group: Any = None, *, capacity: int = _CAPACITY) -> None:
        self._ranks, self._group, self._capacity = ranks, group, capacity
        self._memory: list[torch.Tensor] = []  # of each bucket; kept, since new pages take time
        self._is_open, self._has_begun = True, False
        self._plan = _plan(((), ()), capacity)
        self._tensors: list[Any] = []  # of the list under way, but those that have not arrived
        self._missing: list[int] = []  # tensors of each bucket
        self._buckets: list[torch.Tensor] = []
        self._places: list[Places] = []
        self._handles: list[Any] = []  # of the buckets that travel

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor in place by its mean over all ranks, the same to the bit on every rank.

        Collective. See `SharedMemoryTransport.average`.
        """
        self.begin(signature(tensors))
        for index, tensor in enumerate(tensors):
            self.add(index, tensor)
        self.finish()
        self.write(tensors)

    def begin(self, signature: Signature) -> None:
        """Begin to average a list whose tensors are still to arrive. Collective."""
        if not self._is_open:
            raise NanoError(error_message("averaging after the run", "the transport is closed", "Start another run"))
        if self._has_begun:
            got = "an averaging after one that was interrupted"
            raise NanoError(error_message(got, "the ranks are out of step", "Start another run"))
        self._plan = _plan(signature, self._capacity)
        batches = self._plan.batches
        self._tensors, self._handles = [None] * len(signature[0]), []
        self._missing = [len(batch.pieces) for batch in batches]
        self._buckets = [self._bucket(number, batch.length, batch.dtype) for number, batch in enumerate(batches)]
        self._places = [batch.places(bucket) for batch, bucket in zip(batches, self._buckets, strict=True)]
        self._has_begun = True

    @torch.no_grad()
    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Take a tensor of the list, each once, and send what is complete."""
        self._tensors[index] = tensor
        for number in self._plan.buckets_of[index]:
            self._missing[number] -= 1
        while len(self._handles) < len(self._buckets) and not self._missing[len(self._handles)]:
            self._places[len(self._handles)].fill(self._tensors)
            self._send()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means. A bucket in which a tensor is missing is sent, too: the other ranks wait for it."""
        while len(self._handles) < len(self._buckets):
            self._send()
        for work, bucket in zip(self._handles, self._buckets, strict=True):
            self._ranks.finish(work)
            divide(bucket, self._ranks.size)
        self._tensors, self._handles = [], []
        self._has_begun = False

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the means of a list that `finish` has ended to `tensors`, which have its shapes."""
        for places in self._places:
            places.empty(tensors)

    def leave(self) -> None:
        """Announce nothing: the ranks of several hosts find out by the timeout, or by their launcher."""

    def close(self) -> None:
        """Give back all memory, and the group.

        A group of gloo that is collected as garbage in a forked process, such as a loader's worker, ends that process:
        it joins threads that are not there.
        """
        self._memory, self._buckets, self._places, self._handles = [], [], [], []
        self._group, self._is_open = None, False

    def _send(self) -> None:
        bucket = self._buckets[len(self._handles)]
        self._handles.append(distributed.all_reduce(bucket, group=self._group, async_op=True))

    def _bucket(self, number: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        dtype = torch.float32 if is_summed_wider(dtype) else dtype
        nbytes = length * dtype.itemsize
        if number == len(self._memory):
            self._memory.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._memory[number].numel() < nbytes:
            self._memory[number] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[number][:nbytes].view(dtype)


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
        sent = {key: gradient for key, (gradient, then) in self._sent.items() if version(gradient) == then}
        are_as_sent = all(sent.get(key) is parameter.grad for key, parameter in self._parameters.items())
        return SPOILED if self._is_spoiled or not (are_as_sent and sent.keys() == self._parameters.keys()) else WHOLE

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
