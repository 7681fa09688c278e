"""torch.distributed between ranks of one host without a socket: a process group over the channel in shared memory.

torch accepts a process group that is written in Python like a built-in one, so `torch.distributed`'s functions,
`DistributedSampler`, `DistributedDataParallel` and libraries over them work in a run as they do with gloo. A collective
with ``async_op=True`` is done when it returns. Messages from one rank to another, and the coalesced forms of
collectives, raise an error that names what to call instead.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.distributed import ReduceOp
from torch.futures import Future

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.raw_bytes import copy_back, flattened, parts_of_streams, raw_bytes, with_copy
from nano_loop.distributed.shared_memory.reductions import Reduction
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.errors import NanoError, error_message

#: torch.distributed's name of this backend.
NAME = "nano_loop"

Tensors = Sequence[torch.Tensor]


class Done(distributed.Work):
    """A collective that is done.

    Parameters
    ----------
    result : list of torch.Tensor
        What its future gives.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Any:
        """Return the tensors."""
        return self._result

    def get_future(self) -> Any:
        """Return a future that is complete."""
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


# Its methods have more overloads than torch.distributed's functions call.
_ProcessGroup: Any = distributed.ProcessGroup


class SharedGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of torch between ranks of one host.

    Parameters
    ----------
    ranks : Ranks
        The ranks of the group.
    channel : callable
        Returns their channel; it is called when they first use it.
    name : str
        What torch calls it.
    """

    def __init__(self, ranks: Ranks, channel: Callable[[], SharedChannel], name: str) -> None:
        super().__init__(ranks.rank, ranks.size)
        self._name = name
        self._open = channel

    @property
    def _channel(self) -> SharedChannel:
        return self._open()

    @property
    def group_name(self) -> str:
        """What torch calls it, which it asks when it destroys it."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return torch.distributed's name of this backend."""
        return NAME

    # --- each rank's tensor to all ---

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.broadcast`."""
        with_copy(tensors[0], lambda tensor: self._channel.broadcast_tensor(tensor, opts.rootRank))
        return Done([*tensors])

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.all_gather`."""
        self._gather(outputs[0], inputs[0])
        return Done([*outputs])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done:
        """See `torch.distributed.all_gather_into_tensor`."""
        whole = output.detach().contiguous()
        self._gather(whole.view(-1).chunk(self.size()), tensor.reshape(-1))
        return _copied(whole, output)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.gather`."""
        self._gather(outputs[0] if outputs else [], inputs[0])
        return Done([*outputs])

    def _gather(self, outputs: Tensors, tensor: torch.Tensor) -> None:
        sent, sizes = flattened(tensor), [output.nbytes for output in outputs]
        if any(size != sent.nbytes for size in sizes):
            got = f"gathering {sent.nbytes} bytes of each rank to tensors of {', '.join(map(str, sizes))}"
            hint = "Pass a tensor of the shape and dtype of the others' for each rank"
            raise NanoError(error_message(got, "they are of one size", hint))
        self._move(f"gather of {sent.nbytes} bytes", sent, outputs, [0] * len(outputs))

    def _move(self, what: str, sent: torch.Tensor, outputs: Tensors, starts: Sequence[int], first: int = 0) -> None:
        """Send a stream. Fill tensors from the streams of rank `first` and the ranks after it, at `starts`."""
        wholes = [output.detach().contiguous() for output in outputs]
        self._channel.exchange(what, raw_bytes(sent), parts_of_streams(wholes, starts, first))
        for whole, output in zip(wholes, outputs, strict=True):
            copy_back(whole, output)

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

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Done:
        """See `torch.distributed.reduce_scatter`."""
        sizes = [tensor.numel() for tensor in inputs[0]]
        self._reduce_scatter(outputs[0], torch.cat([flattened(tensor) for tensor in inputs[0]]), sizes, opts)
        return Done([*outputs])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done:
        """See `torch.distributed.reduce_scatter_tensor`."""
        self._reduce_scatter(output, flattened(tensor), [output.numel()] * self.size(), opts)
        return Done([output])

    def _reduce(self, tensor: torch.Tensor, operation: Any, *, here: bool) -> None:
        if tensor.layout is not torch.strided:
            _reduce_sparse(self._channel, tensor, operation, here=here)
            return
        reduction = Reduction(operation, tensor.dtype)
        if here:
            with_copy(tensor, lambda whole: self._channel.reduce(whole, reduction, everywhere=True))
        else:
            self._channel.reduce(flattened(tensor), reduction, everywhere=False)

    def _reduce_scatter(self, output: torch.Tensor, stream: torch.Tensor, sizes: list[int], opts: Any) -> None:
        reduction = Reduction(opts.reduceOp, output.dtype)
        whole = output.detach().contiguous()
        start = sum(sizes[: self.rank()]) * output.dtype.itemsize
        receive = self._channel.combining(whole.view(-1), reduction, start)
        self._channel.exchange(f"scattered {reduction.name} of {sizes} {output.dtype}", raw_bytes(stream), receive)
        _copied(whole, output)

    # --- parts ---

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Done:
        """See `torch.distributed.scatter`."""
        parts, size = inputs[0] if inputs else [], outputs[0].nbytes
        stream = torch.cat([flattened(part).view(torch.uint8) for part in parts]) if parts else _NOTHING
        what = f"scatter of {opts.rootRank}, {size} bytes"
        self._move(what, stream, outputs, [self.rank() * size], opts.rootRank)
        return Done([*outputs])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """See `torch.distributed.all_to_all`."""
        sent = [flattened(tensor).view(torch.uint8) for tensor in inputs]
        gathered = self._channel.gather(array("q", map(len, sent)).tobytes())
        of_rank = [array("q", packed) for packed in gathered]
        for rank, (lengths, output) in enumerate(zip(of_rank, outputs, strict=True)):
            size = lengths[self.rank()]
            if size != output.nbytes:
                got = f"rank {rank} sends {size} bytes to a tensor of {tuple(output.shape)} {output.dtype}"
                expected = "what is sent and the tensor that receives it are of one size"
                raise NanoError(error_message(got, expected, "Check the shapes of the tensors that all ranks pass"))
        self._move("all to all", torch.cat(sent), outputs, [sum(lengths[: self.rank()]) for lengths in of_rank])
        return Done([*outputs])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Done:
        """See `torch.distributed.all_to_all_single`."""
        whole, count = output.detach().contiguous(), self.size()
        outputs = _split(whole, output_sizes) if output_sizes else whole.chunk(count)
        inputs = _split(tensor, input_sizes) if input_sizes else tensor.chunk(count)
        self.alltoall(outputs, inputs)
        return _copied(whole, output)

    def barrier(self, opts: Any = None) -> Done:
        """See `torch.distributed.barrier`."""
        self._channel.barrier()
        return Done([])

    def _refuse_message(self, *args: Any, **kwargs: Any) -> NoReturn:
        expected = "processes of one host exchange values by collectives alone"
        hint = "Use broadcast or all_gather, which every rank calls, or pass process_group_backend='gloo'"
        raise NanoError(error_message("a message from one rank to another", expected, hint))

    def _refuse_coalesced(self, *args: Any, **kwargs: Any) -> NoReturn:
        expected = "processes of one host take one tensor in each call"
        raise NanoError(error_message("a coalesced collective", expected, "Call the collective for each tensor"))

    send = recv = recv_anysource = _refuse_message
    allgather_coalesced = allreduce_coalesced = _refuse_coalesced
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _refuse_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _refuse_coalesced

    # What torch 2.8 calls them, and the C++ of all versions.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _split(tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = tensor.split([*sizes])  # type: ignore[no-untyped-call]
    return parts


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _copied(whole: torch.Tensor, output: torch.Tensor) -> Done:
    copy_back(whole, output)
    return Done([output])


def _reduce_sparse(channel: SharedChannel, tensor: torch.Tensor, operation: Any, *, here: bool) -> None:
    if operation != ReduceOp.SUM:
        got = f"{operation} of a sparse tensor"
        raise NanoError(error_message(got, "sparse tensors can be summed", "Use ReduceOp.SUM, or tensor.to_dense()"))
    parts = [pickle.loads(data) for data in channel.gather(pickle.dumps(tensor))]
    if here:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        with torch.no_grad():  # not `detach`, of which a sparse tensor would not get the new indices
            tensor.copy_(total.coalesce())


class SharedGroups:
    """The process groups of one run.

    Parameters
    ----------
    ranks : Ranks
        All ranks of the run.
    folder : pathlib.Path
        Their private folder.
    channel : SharedChannel
        Their channel, which the default process group uses.
    """

    def __init__(self, ranks: Ranks, folder: Path, channel: SharedChannel) -> None:
        self._ranks, self._folder, self._channel = ranks, folder, channel
        self._channels: dict[str, SharedChannel] = {}

    def make(self, options: Any, backend_options: Any = None) -> SharedGroup:
        """Make the group that torch describes by its ``_DistributedBackendOptions``; the first is the default group."""
        members = tuple(options.global_ranks_in_group) or tuple(range(self._ranks.size))
        name = f"{len(members)}-{options.group_id}"
        ranks = self._ranks.group(members, timeout=options.timeout.total_seconds())
        default = not options.global_ranks_in_group
        channel = (lambda: self._channel) if default else (lambda: self._channel_of(name, ranks))
        return SharedGroup(ranks, channel, options.group_id)

    def close(self, *, returned: bool) -> None:
        """Leave the channels of all groups but the default one."""
        for channel in self._channels.values():
            channel.leave(returned=returned)
            channel.close()

    def _channel_of(self, name: str, ranks: Ranks) -> SharedChannel:
        if name not in self._channels:
            self._channels[name] = SharedChannel(ranks, self._folder, f"channel-{name}")
        return self._channels[name]
