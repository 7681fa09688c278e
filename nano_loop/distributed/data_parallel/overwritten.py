"""Parameters that a model's own calls overwrite, as embeddings with ``max_norm`` do: each rank by its own batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.torch_private import versions

_watches: list[Overwritten] = process_wide("parameters that calls overwrite, by run", [])


class Overwritten:
    """Notes which parameters have another version after a call than before it, and brings the ranks into line.

    The rows that an embedding has renormed on any rank are renormed on all ranks, as by one process with all batches.

    Parameters
    ----------
    ranks : Ranks
        The processes.

    Attributes
    ----------
    ids : set of int
        Those of the parameters that calls have overwritten since the last `settle`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.ids: set[int] = set()
        self._watched: Sequence[torch.Tensor] = ()  # in the call under way
        self._versions: list[int] = []
        self._rows: dict[tuple[int, torch.Size], torch.Tensor] = {}  # which were renormed, by memory and shape
        self._undoing = ExitStack()
        self._undoing.enter_context(replaced(torch, "embedding_renorm_", _noting_rows))
        _watches.append(self)
        self._undoing.callback(_watches.remove, self)

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that a call begins, or goes on after a change that is not its own."""
        self._watched, self._versions = parameters, versions(parameters)

    def note(self) -> None:
        """Note which parameters the call has overwritten until now."""
        now = versions(self._watched)
        if now != self._versions:
            pairs = zip(self._watched, self._versions, now, strict=True)
            self.ids.update(id(parameter) for parameter, before, after in pairs if before != after)
            self._versions = now

    def resume(self) -> None:
        """Leave out what has changed since `note` in the call, if one is under way: a step of an optimizer in it."""
        self._versions = versions(self._watched)

    def end(self) -> None:
        """Note that the call has ended."""
        self.note()
        self._watched, self._versions = (), []

    def settle(self, in_order: Sequence[torch.Tensor]) -> list[int]:
        """Make renormed rows equal on all ranks, and return the places of all overwritten parameters. Collective.

        Parameters
        ----------
        in_order : sequence of torch.Tensor
            All parameters, in the same order on every rank.
        """
        own = [(place, self._renormed(tensor)) for place, tensor in enumerate(in_order) if id(tensor) in self.ids]
        gathered = [*itertools.chain.from_iterable(self._ranks.gather(own, AVERAGING))]
        with torch.no_grad():
            for place, rows in gathered:
                if rows is not None:
                    in_order[place][rows[0]] = rows[1]
        self.resume()
        self.ids.clear()
        self._rows.clear()
        return sorted({place for place, _ in gathered})

    def close(self) -> None:
        """Take no more notes."""
        self._undoing.close()

    def note_rows(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """Note that an embedding has renormed these rows of its weight."""
        rows = self._rows.setdefault((weight.data_ptr(), weight.shape), torch.zeros(len(weight), dtype=torch.bool))
        rows[indices.reshape(-1)] = True

    def _renormed(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        rows = self._rows.get((parameter.data_ptr(), parameter.shape))
        if rows is None:
            return None
        indices = rows.nonzero().view(-1)
        return indices, parameter.detach()[indices]


def _noting_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def embedding_renorm_(weight: torch.Tensor, indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for watch in _watches:
                watch.note_rows(weight, indices)
        return original(weight, indices, *args, **kwargs)

    return embedding_renorm_
