"""The transport between ranks of one host: through memory that they share, several times as fast as gloo's loopback."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

import torch

from nano_loop.distributed.comm.packing import Packing, Signature, pack, signature
from nano_loop.distributed.comm.ranks import Ranks, Reached
from nano_loop.distributed.shared_memory.shared_ring import BetweenHosts, Elements, Plan, Ring
from nano_loop.distributed.shared_memory.shared_segment import SharedSegment
from nano_loop.errors import NanoError, error_message

_CHUNK = 1 << 20  # bytes that are copied, summed and copied back at once; the ring of them stays in a cache
_LEAST = 1 << 16  # such bytes where all gradients together are few
_SLOTS = 3  # one is copied in, one summed, one copied out
_HEADER = 1 << 14  # bytes of a header that travel at once

_BEGUN, *_OF_RING = range(5)  # the counters
_MARKS, _LENGTHS = 1, 3  # words behind the counter of what has begun, two of each
_EXCHANGE = -1  # the mark of an exchange; those of averages are not negative


class SharedMemoryTransport:
    """Averages through a ring of slots in a file that all ranks map. See `Transport`.

    What a rank begins, it counts and marks, so that ranks which do different things (average other lists, or the one
    averages while the other exchanges) find out before they touch a tensor. A rank can be one collective ahead of
    another, and never two; so marks and headers alternate between two places.

    Parameters
    ----------
    ranks : Ranks
        Two or more, all on this host. Collective.
    mapped : callable
        See `SharedSegment`, such as `map_together` with a folder of a file system in memory.
    compression : torch.dtype, optional
        In which float32 and float64 tensors travel, such as ``torch.bfloat16``.
    chunk : int
        Bytes that are averaged at once, a multiple of 128.
    slots : int
        Such chunks under way at a time, two or more.
    names : sequence of int, optional
        What messages call the ranks; by default they are numbered from 0.
    between : BetweenHosts, optional
        In a run on several hosts.

    Raises
    ------
    NanoError
        What `mapped` raises, if there is no room.
    """

    def __init__(
        self,
        ranks: Ranks,
        mapped: Callable[[int], mmap.mmap],
        *,
        compression: torch.dtype | None = None,
        chunk: int = _CHUNK,
        slots: int = _SLOTS,
        names: Sequence[int] = (),
        between: BetweenHosts | None = None,
    ) -> None:
        of_headers = 2 * ranks.size * _HEADER
        nbytes = of_headers + Ring.nbytes(ranks.size, chunk, slots, between)
        segment = SharedSegment(ranks, 1 + len(_OF_RING), nbytes, mapped, purpose="average gradients", names=names)
        headers, of_ring = segment.memory[:of_headers], segment.memory[of_headers:]
        ring = Ring(ranks, segment, of_ring, counters=_OF_RING, slots=slots, between=between)
        #: Bytes that are averaged at once.
        self.chunk = chunk
        self._ranks, self._names = ranks, names or range(ranks.size)
        self._segment: SharedSegment | None = segment
        self._headers = headers.view(2, ranks.size, _HEADER)
        self._ring = ring
        self._begun = segment.places(_BEGUN)
        self._operations = 0
        self._unfinished = False

        @lru_cache(maxsize=64)
        def plan(signature: Signature) -> Plan:  # not a method, which would hold the memory in a cycle after `close`
            return ring.plan(pack(signature, chunk, compression))

        self._plan = plan

    def exchange(self, header: torch.Tensor) -> list[torch.Tensor]:
        """See `Transport.exchange`."""
        pieces: list[list[torch.Tensor]] = [[] for _ in range(self._ranks.size)]
        sent, longest = 0, 1
        while sent < longest:
            lengths = self._exchange_piece(header, sent, pieces)
            sent, longest = sent + _HEADER, max(lengths)
        return [torch.cat(piece) for piece in pieces]

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Transport.average`; a NanoError is also raised, on every rank, where ranks give different lists."""
        self._open()
        plan = self._plan(signature(tensors))
        elements = Elements([*tensors], plan.packing.flat(tensors))
        _finish(self._averaging(plan, elements, elements))

    def stream(self, targets: Sequence[torch.Tensor]) -> Stream:
        """Begin to average a list whose tensors are still to arrive. It has to be finished before the next averaging.

        Collective, and only in a run on several hosts.

        Parameters
        ----------
        targets : sequence of torch.Tensor
            Where the means go: of the list's shapes and dtypes.
        """
        self._open()
        plan = self._plan(signature(targets))
        sources, means = Elements([None] * len(targets), {}), Elements([*targets], plan.packing.flat(targets))
        return Stream(plan.packing, sources, self._averaging(plan, sources, means))

    def leave(self) -> None:
        """See `Transport.leave`."""
        self._open().leave()

    def close(self) -> None:
        """See `Transport.close`."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
            del self._headers, self._ring, self._plan

    def _exchange_piece(self, header: torch.Tensor, sent: int, pieces: list[list[torch.Tensor]]) -> list[int]:
        """Exchange the bytes from `sent` on, as many as travel at once, and return the lengths of all whole headers."""
        segment = self._open()
        with self._operation():
            turn = (self._operations + 1) % 2
            piece = header[sent : sent + _HEADER]
            self._headers[turn, self._ranks.rank, : len(piece)].copy_(piece)
            segment.words[self._begun[self._ranks.rank] + _LENGTHS + turn] = header.numel()
            _finish(self._begin(_EXCHANGE))
            lengths = [segment.words[place + _LENGTHS + turn] for place in self._begun]
            for own, memory, length in zip(pieces, self._headers[turn], lengths, strict=True):
                own.append(memory[: max(length - sent, 0)].clone())
        return lengths

    def _averaging(self, plan: Plan, sources: Elements, targets: Elements) -> Iterator[Reached]:
        with self._operation():
            yield from self._begin(plan.packing.mark)
            yield from self._ring.average(plan, sources, targets)

    def _begin(self, mark: int) -> Iterator[Reached]:
        """Announce what this rank begins, which all others have to begin too; raise if one begins something else."""
        segment = self._open()
        self._operations += 1
        offset = _MARKS + self._operations % 2
        segment.words[self._begun[self._ranks.rank] + offset] = mark
        segment.publish(self._begun[self._ranks.rank], self._operations)
        yield partial(segment.reached, self._begun, self._operations)
        others = [
            name for name, place in zip(self._names, self._begun, strict=True) if segment.words[place + offset] != mark
        ]
        if others:
            raise NanoError(_differs(self._names[self._ranks.rank], others))

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Refuse to go on after an operation that was not finished: the ranks are out of step then."""
        if self._unfinished:
            raise NanoError(_OUT_OF_STEP)
        self._unfinished = True
        yield
        self._unfinished = False

    def _open(self) -> SharedSegment:
        if self._segment is None:
            raise NanoError(error_message("averaging after the run", "the transport is closed", "Start another run"))
        return self._segment


class Stream:
    """A list that is averaged while its tensors arrive.

    Parameters
    ----------
    packing : Packing
        How the list is packed.
    sources : Elements
        Its tensors, none of which is there yet.
    averaging : iterator of Reached
        What is left to do.
    """

    def __init__(self, packing: Packing, sources: Elements, averaging: Iterator[Reached]) -> None:
        self._packing, self._sources, self._averaging = packing, sources, averaging
        self._reached = next(averaging, None)

    @torch.no_grad()
    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Take a tensor of the list, which stays as it is until `finish`, and go on as far as there is no wait."""
        self._sources.tensors[index] = tensor
        if index in self._packing.split:
            self._sources.flat[index] = tensor.contiguous().view(-1)
        while self._reached is not None and self._reached(False):
            self._reached = next(self._averaging, None)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until all tensors, which have arrived, are averaged."""
        if self._reached is not None:
            self._reached(True)
            _finish(self._averaging)
            self._reached = None


def _finish(steps: Iterator[Reached]) -> None:
    for reached in steps:
        reached(True)


def chunk_for(nbytes: int) -> int:
    """Return the chunk for gradients of so many bytes together: memory that nobody uses takes time to make.

    For a model of some thousand parameters, the memory for the largest chunk took 20 ms of each run.
    """
    return min(max(1 << max(nbytes - 1, 0).bit_length(), _LEAST), _CHUNK)


_OUT_OF_STEP = error_message(
    "averaging after an averaging that was interrupted", "the ranks are out of step", "Start another run"
)


def _differs(rank: int, others: Sequence[int]) -> str:
    names = ", ".join(map(str, others))
    got = f"rank {rank} averages other gradients than rank {names}"
    hint = "Make the loop do the same on every rank: the same model, the same parameters frozen, the same steps"
    return error_message(got, "all ranks must average the same gradients in the same order", hint)
