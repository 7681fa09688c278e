"""torch.distributed between ranks of one host without sockets: a process group over the shared memory channel.

torch accepts process groups written in Python like built-in ones, so `torch.distributed`'s functions,
`DistributedSampler`, `DistributedDataParallel` and libraries based on them work in a run as they do with gloo.
Collectives with ``async_op=True`` are finished when they return. Point-to-point messages, reduce_scatter,
all_to_all_single and coalesced collectives raise an error that names the alternative.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.distributed import ReduceOp
from torch.futures import Future

from nano_loop.distributed.comm.averaging_math import divide
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.raw_bytes import flattened, raw_bytes, with_copy
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.patch_table import process_wide

#: The name of this backend in torch.distributed.
NAME = "nano_loop"

Tensors = Sequence[torch.Tensor]


class Done(distributed.Work):
    """A finished collective, with the result of its future."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return immediately."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Any:
        """Return a completed future."""
        return self._future


# Its stubs lack overloads that torch.distributed's functions call.
_ProcessGroup: Any = distributed.ProcessGroup


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    got = "a message to one rank, a reduce_scatter, an all_to_all_single or a coalesced collective"
    expected = "processes on one host exchange single tensors by the other collectives"
    hint = "Use broadcast, all_gather, all_reduce or all_to_all, or pass process_group_backend='gloo'"
    raise NanoError(error_message(got, expected, hint))


class SharedGroup(_ProcessGroup):  # type: ignore[misc]
    """A torch process group between ranks of one host, which opens its channel at first use."""

    def __init__(self, ranks: Ranks, channel: Callable[[], SharedChannel], name: str) -> None:
        super().__init__(ranks.rank, ranks.size)
        self._name = name
        self._channel = channel

    @property
    def group_name(self) -> str:
        """The name that torch gives it and reads when it destroys the group."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:  # read before asynchronous saves
        return [torch.device("cpu")]

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name of this backend in torch.distributed."""
        return NAME

    def _exchange(self, what: str, sent: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the bytes of all ranks' tensors."""
        data = raw_bytes(flattened(sent)) if sent is not None else b""
        gathered = self._channel().exchange(data, what)
        return [torch.frombuffer(part, dtype=torch.uint8) if part else _NOTHING for part in gathered]

    # --- each rank's tensor to all ---

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.broadcast`."""
        tensor, root = tensors[0], opts.rootRank
        what = f"broadcast of {root}, {tensor.nbytes} bytes"
        _fill(tensor, self._exchange(what, tensor if self.rank() == root else None)[root])
        return Done([*tensors])

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.all_gather`."""
        self._gather(outputs[0], inputs[0])
        return Done([*outputs])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done:
        """See `torch.distributed.all_gather_into_tensor`."""
        with_copy(output, lambda whole: self._gather(whole.view(-1).chunk(self.size()), tensor))
        return Done([output])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.gather`."""
        self._gather(outputs[0] if outputs else [], inputs[0])
        return Done([*outputs])

    def _gather(self, outputs: Tensors, tensor: torch.Tensor) -> None:
        gathered = self._exchange(f"gather of {tensor.nbytes} bytes", tensor)
        for output, part in zip(outputs, gathered, strict=False):
            _fill(output, part)

    # --- one tensor of all ranks' ---

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.all_reduce`."""
        operation = ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in tensors:
            self._reduce(tensor, operation, here=True)
        return Done([*tensors])

    def reduce(self, tensors: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.reduce`."""
        self._reduce(tensors[0], opts.reduceOp, here=self.rank() == opts.rootRank)
        return Done([*tensors])

    def _reduce(self, tensor: torch.Tensor, operation: Any, *, here: bool) -> None:
        if tensor.layout is not torch.strided:
            _reduce_sparse(self._channel(), tensor, operation, here=here)
            return
        name = _name_of(operation)

        def change(whole: torch.Tensor) -> None:
            for part in whole.view(-1).split(_PIECE):  # type: ignore[no-untyped-call]
                parts = self._exchange(f"{name} of {whole.numel()} {whole.dtype}", part)
                total = _reduced(name, [one.view(part.dtype) for one in parts])
                if here:
                    part.copy_(total.view(part.shape))

        with_copy(tensor, change)

    # --- parts ---

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Done:
        """See `torch.distributed.scatter`."""
        parts, size, root = inputs[0] if inputs else [], outputs[0].nbytes, opts.rootRank
        stream = torch.cat([flattened(part).view(torch.uint8) for part in parts]) if parts else None
        received = self._exchange(f"scatter of {root}, {size} bytes", stream)[root]
        _fill(outputs[0], received[self.rank() * size :][:size])
        return Done([*outputs])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.all_to_all`."""
        sent = [flattened(tensor).view(torch.uint8) for tensor in inputs]
        sizes = self._exchange("sizes of all to all", torch.tensor([*map(len, sent)]))
        gathered = self._exchange("all to all", torch.cat(sent))
        for packed, stream, output in zip(sizes, gathered, outputs, strict=True):
            lengths = packed.view(torch.int64).tolist()
            start = sum(lengths[: self.rank()])
            _fill(output, stream[start : start + lengths[self.rank()]].clone())  # copied to aligned memory
        return Done([*outputs])

    def barrier(self, opts: Any = None) -> Done:
        """See `torch.distributed.barrier`."""
        self._channel().exchange(b"", "barrier")
        return Done([])

    # Names that begin with an underscore, and `alltoall_base`, are those of torch 2.8, and of the C++ of all versions.
    _allgather_base = all_gather_single
    send = recv = recv_anysource = all_to_all_single = alltoall_base = _refuse
    reduce_scatter = reduce_scatter_single = _reduce_scatter_base = reduce_scatter_single_coalesced = _refuse
    allgather_coalesced = allreduce_coalesced = all_gather_single_coalesced = _refuse
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _refuse


_NOTHING = torch.empty(0, dtype=torch.uint8)
_PIECE = 1 << 22  # elements that are reduced at a time


def _fill(output: torch.Tensor, content: torch.Tensor) -> None:
    """Overwrite a tensor of any strides by bytes or by a tensor's elements; torch raises if these are not as many."""
    output.detach().copy_(content.view(output.dtype).view(output.shape))


def _reduce_sparse(channel: SharedChannel, tensor: torch.Tensor, operation: Any, *, here: bool) -> None:
    if operation != ReduceOp.SUM:
        got = f"{operation} of a sparse tensor"
        raise NanoError(error_message(got, "sparse tensors can be summed", "Use ReduceOp.SUM, or tensor.to_dense()"))
    parts = [pickle.loads(data) for data in channel.exchange(pickle.dumps(tensor), "sum of sparse tensors")]
    if here:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        with torch.no_grad():  # with `detach`, a sparse tensor would not get the new indices
            tensor.copy_(total.coalesce())


#: Combine the result of the previous ranks with the next rank's tensor, in place of the former.
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda total, other: torch.minimum(total, other, out=total),
    "MAX": lambda total, other: torch.maximum(total, other, out=total),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


def _name_of(operation: Any) -> str:
    """Return the name of a torch reduction; raise a NanoError if ranks of one host cannot compute it."""
    for name in _COMBINE:
        if operation == getattr(ReduceOp, name):
            return name
    expected = f"processes on one host can compute {', '.join(_COMBINE)}"
    raise NanoError(error_message(f"{operation}", expected, "Use one of these"))


def _reduced(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the reduction in rank order, bitwise identical on every rank, in the memory of the first tensor."""
    total, *others = parts
    for other in others:
        _COMBINE[name](total, other)
    if name == "AVG" and (total.is_floating_point() or total.is_complex()):
        divide(total, len(parts))
    elif name == "AVG":
        total.div_(len(parts), rounding_mode="trunc")
    return total


#: Of the active run; torch's registry of backends outlives it.
_groups: list[SharedGroups] = process_wide("process groups of runs", [])


class SharedGroups(AbstractContextManager["SharedGroups"]):
    """The process groups that torch creates during a run.

    The default one uses the ranks' channel, the others have files in their folder.
    """

    def __init__(self, ranks: Ranks, folder: Path, channel: SharedChannel) -> None:
        self._ranks, self._folder, self._channel = ranks, folder, channel
        self._channels: dict[str, SharedChannel] = {}
        self._thread = threading.get_ident()  # the loop's thread
        if NAME not in distributed.Backend.backend_list:
            distributed.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])
        _groups.append(self)

    def make(self, options: Any) -> SharedGroup:
        """Create the group described by torch's ``_DistributedBackendOptions``; the first one is the default group."""
        members = tuple(options.global_ranks_in_group) or tuple(range(self._ranks.size))
        name = f"{len(members)}-{options.group_id}"
        ranks = self._ranks.group(members, timeout=options.timeout.total_seconds())
        is_default = not options.global_ranks_in_group

        def channel() -> SharedChannel:
            # Collectives of other threads, as for a checkpoint saved in the background, can interleave with any others.
            is_loops = is_default and threading.get_ident() == self._thread
            if is_loops:
                return self._channel
            if name not in self._channels:
                self._channels[name] = SharedChannel(ranks, self._folder, f"channel-{name}")
            return self._channels[name]

        return SharedGroup(ranks, channel, options.group_id)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the channels of all groups except the default group."""
        _groups.remove(self)
        for channel in self._channels.values():
            channel.leave(returned=kind is None)
            channel.close()


def _make_group(options: Any, backend_options: Any = None) -> SharedGroup:
    if not _groups:
        got = f"backend={NAME!r} outside a run"
        raise NanoError(error_message(got, "it connects the ranks of a nano_loop run", 'Use "gloo"'))
    return _groups[-1].make(options)
