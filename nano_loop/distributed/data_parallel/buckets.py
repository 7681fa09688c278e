"""Sends gradients between hosts in buckets during the backward, as `DistributedDataParallel` does.

Once all parameters of a run have had a gradient in one backward, on all ranks, the gradients of the next backward are
sent as they arrive, last ones first, and their means are stored in separate memory until the backward ends. The ranks
then agree on whether the means are valid: they are not if a gradient was missing, came twice, or was changed after it
was sent. In this case they are discarded, and the unchanged gradients are averaged as usual. If this happens more than
rarely, the rest of the run is not overlapped.
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

#: A rank's status of the averaging: not started, valid, or invalid.
NONE, WHOLE, SPOILED = range(3)
#: The number of invalid averagings that are tolerated, plus one for each this many valid ones.
_MAX_USELESS, _USELESS_RATIO = 2, 10

_CAPACITY = 25 << 20  # maximum size of a bucket in bytes


class _Plan(NamedTuple):
    """How a list is packed, and the buckets that contain a part of each tensor."""

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
    """Averages over a group for these lists only. A bucket is sent as soon as it and the previous ones are complete."""

    def __init__(self, ranks: Ranks, group: Any = None, *, capacity: int = _CAPACITY) -> None:
        self._ranks, self._group, self._capacity = ranks, group, capacity
        self._has_begun = False
        self._plan = _plan(((), ()), capacity)
        self._tensors: list[Any] = []  # of the current list, except those that have not arrived
        self._missing: list[int] = []  # number of tensors by bucket
        self._buckets: list[torch.Tensor] = []
        self._places: list[Places] = []
        self._handles: list[Any] = []  # of the buckets in flight

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor by its mean, as `SharedMemoryTransport.average`. Collective."""
        self.begin(signature(tensors))
        for index, tensor in enumerate(tensors):
            self.add(index, tensor)
        self.finish()
        self.write(tensors)

    def begin(self, signature: Signature) -> None:
        """Start to average a list whose tensors have not arrived yet. Collective."""
        if self._has_begun:
            got = "an averaging after one that was interrupted"
            raise NanoError(error_message(got, "the ranks are out of step", "Start another run"))
        self._plan = _plan(signature, self._capacity)
        batches = self._plan.batches
        self._tensors, self._handles = [None] * len(signature[0]), []
        self._missing = [len(batch.pieces) for batch in batches]
        self._buckets, self._places = [], []  # frees the previous ones first
        self._buckets = [_empty_bucket(batch) for batch in batches]
        self._places = [Places(batch.pieces, bucket) for batch, bucket in zip(batches, self._buckets, strict=True)]
        self._has_begun = True

    @torch.no_grad()
    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Add a tensor of the list, each exactly once, and send complete buckets."""
        self._tensors[index] = tensor
        for number in self._plan.buckets_of[index]:
            self._missing[number] -= 1
        while len(self._handles) < len(self._buckets) and not self._missing[len(self._handles)]:
            self._places[len(self._handles)].copy_from(self._tensors)
            self._send()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means. Buckets with missing tensors are sent as well: the other ranks wait for them."""
        while len(self._handles) < len(self._buckets):
            self._send()
        for work, bucket in zip(self._handles, self._buckets, strict=True):
            self._ranks.finish(work)
            divide(bucket, self._ranks.size)
        self._tensors, self._handles = [], []
        self._has_begun = False

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the means of a finished list to `tensors`, which have the same shapes."""
        for places in self._places:
            places.copy_to(tensors)

    def close(self) -> None:
        """Release all memory, and the group, which would end a forked process that collects it as garbage."""
        self._buckets, self._places, self._handles = [], [], []
        self._group = None

    def _send(self) -> None:
        bucket = self._buckets[len(self._handles)]
        self._handles.append(distributed.all_reduce(bucket, group=self._group, async_op=True))


def _empty_bucket(batch: Batch) -> torch.Tensor:
    dtype = torch.float32 if is_summed_wider(batch.dtype) else batch.dtype
    return torch.empty(batch.length, dtype=dtype, device="cpu")


class Overlap:
    """The averaging of the gradients of the current backward by a transport; None disables the overlap."""

    def __init__(self, transport: GroupTransport | None) -> None:
        self._transport: Any = transport
        self._parameters: dict[int, torch.Tensor] = {}  # by id, in the order in which they are averaged
        self._places: dict[int, int] = {}  # the positions in this order, by id
        self._signature: Signature = ((), ())
        self._has_begun = self._is_spoiled = False
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # gradients and their versions when sent, by parameter
        self._useful = self._useless = 0

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record, in order, the parameters that should have gradients in the next backward; none disables overlap."""
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
        """Record the start of a backward, which may be overlapped."""
        if self._has_begun:
            self._is_spoiled = True  # by a backward that did not finish
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
        """The status to send to the other ranks: NONE, WHOLE or SPOILED."""
        if not self._has_begun:
            return NONE
        sent = {key: gradient for key, (gradient, then) in self._sent.items() if version(gradient) == then}
        are_as_sent = all(sent.get(key) is parameter.grad for key, parameter in self._parameters.items())
        return SPOILED if self._is_spoiled or not (are_as_sent and sent.keys() == self._parameters.keys()) else WHOLE

    def finish(self, states: Sequence[int]) -> Collection[int]:
        """Finish the averaging if a rank has begun it, and return the ids of averaged parameters. Collective."""
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
            self._parameters = {}  # makes `expect` read shapes and dtypes again
        self._has_begun, self._sent, self._is_spoiled = False, {}, False
        self._useful, self._useless = self._useful + is_mean, self._useless + (not is_mean)
        return self._parameters.keys()

    def _begin(self) -> None:
        self._transport.begin(self._signature)
        self._has_begun = True
