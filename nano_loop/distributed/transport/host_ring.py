"""The slots through which the batches of one host's ranks become one, and through which the result comes back.

Each rank copies its batch into its part of a slot, and sums a slice of all parts into the result's. The first rank of
the host then makes that the mean over all hosts. A slot is used again when all have copied the result out. A rank that
is alone on its host has the result's part only, in memory of its process.

Four counters of each rank count batches over the ring's life: *posted*, *reduced*, *sent* (of the first rank alone)
and *read*.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.transport.allocation import map_by_name
from nano_loop.distributed.transport.means import new_scratch, real, write_mean
from nano_loop.distributed.transport.packing import Batch
from nano_loop.distributed.transport.shared_segment import LINE, SharedSegment

_POSTED, _REDUCED, _SENT, _READ = _COUNTERS = range(4)
_FILE = "averaging-hosts"


class HostRing:
    """The slots of one host, and this rank's place among its ranks.

    Parameters
    ----------
    ranks : Ranks
        All ranks of the run.
    here : sequence of int
        Those of this host.
    folder : pathlib.Path or None
        Their private folder; None for a rank that is alone.
    slots : int
        How many batches the ring holds.
    room : int
        Bytes of a batch at the most, a multiple of a cache line.

    Raises
    ------
    NanoError
        If there is no room in the folder.
    """

    def __init__(self, ranks: Ranks, here: Sequence[int], folder: Path | None, slots: int, room: int) -> None:
        self._rank, self._size, self._slots = here.index(ranks.rank), len(here), slots
        self._segment: SharedSegment | None = None
        self._scratch = new_scratch()
        shape = slots, self._size + 1, room
        if folder is None:
            self._memory = torch.empty(slots, 1, room, dtype=torch.uint8, device="cpu")
            return
        local = Ranks(self._rank, self._size, check=lambda: ranks.check(), timeout=ranks.timeout, context=ranks.context)
        mapped = partial(map_by_name, folder / _FILE)
        nbytes = slots * (self._size + 1) * room
        self._segment = SharedSegment(local, len(_COUNTERS), nbytes, mapped, purpose="average gradients", names=[*here])
        self._memory = self._segment.memory.view(shape)
        self._places = [self._segment.places(each) for each in _COUNTERS]

    @staticmethod
    def forget(folder: Path) -> None:
        """Delete the file in the folder, which all ranks of the host have mapped."""
        (folder / _FILE).unlink(missing_ok=True)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its host, which exchanges with the other hosts."""
        return self._rank == 0

    def own(self, number: int, batch: Batch) -> torch.Tensor:
        """Return where this rank's part of a batch goes."""
        return self._row(number)[0 if self._segment is None else self._rank][: batch.nbytes].view(batch.dtype)

    def result(self, number: int, nbytes: int) -> torch.Tensor:
        """Return where the result of a batch is, in bytes."""
        return self._row(number)[-1][:nbytes]

    def free(self, number: int, *, wait: bool = True) -> bool:
        """Return whether the slot of a batch may be written to; by default, wait until it may."""
        return self._reached(_READ, number + 1 - self._slots, wait)

    def post(self, number: int) -> None:
        """Announce that this rank's part is there."""
        self._publish(_POSTED, number + 1)

    def posted(self, number: int, *, wait: bool = True) -> bool:
        """Return whether the parts of all ranks are there."""
        return self._reached(_POSTED, number + 1, wait)

    def reduce(self, number: int, batch: Batch, factor: float) -> None:
        """Write this rank's slice of the mean of all parts, times `factor`, to the result."""
        # Slices end where cache lines do, so that no two ranks write to one line.
        length = -(-batch.length // self._size)
        length = -(-length // LINE) * LINE
        start, stop = (min(each * length, batch.length) for each in (self._rank, self._rank + 1))
        parts = [real(each[: batch.nbytes].view(batch.dtype)[start:stop]) for each in self._row(number)]
        if len(parts) > 2:
            write_mean(parts[-1], parts[:-1], self._scratch)
        if factor != 1:
            parts[-1].mul_(factor)
        self._publish(_REDUCED, number + 1)

    def reduced(self, number: int, *, wait: bool = True) -> bool:
        """Return whether the whole result of this host is there."""
        return self._reached(_REDUCED, number + 1, wait)

    def publish_sent(self, number: int) -> None:
        """Announce that the result is the mean over all hosts: for the first rank."""
        self._publish(_SENT, number + 1)

    def sent(self, number: int, *, wait: bool = True) -> bool:
        """Return whether the result is the mean over all hosts."""
        return self._reached(_SENT, number + 1, wait, ranks=1)

    def release(self, number: int) -> None:
        """Announce that this rank has copied the result out."""
        self._publish(_READ, number + 1)

    def leave(self) -> None:
        """Announce that this rank averages no more."""
        if self._segment is not None:
            self._segment.leave()

    def close(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _row(self, number: int) -> torch.Tensor:
        return self._memory[number % self._slots]

    def _publish(self, counter: int, value: int) -> None:
        if self._segment is not None:
            self._segment.publish(self._places[counter][self._rank], value)

    def _reached(self, counter: int, value: int, wait: bool, ranks: int | None = None) -> bool:
        """Return whether the counters of all ranks, or of the first ones, are at a value; or wait until they are."""
        segment = self._segment
        if segment is None:
            return True
        places = self._places[counter][:ranks]
        if wait:
            segment.wait(places, value)
        elif any(segment.words[place] < value for place in places):
            return False
        segment.fence()
        return True
