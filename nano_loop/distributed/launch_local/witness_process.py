"""The witness of a run that splits batches: one more worker, which computes whole batches as one process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from typing_extensions import override

from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch_local.process import WorkerProcess
from nano_loop.distributed.launch_local.server import Server

_PATIENCE = 20.0  # seconds that rank 0 waits for it, and N times as many as it has run itself


class WitnessProcess(WorkerProcess):
    """The witness, as rank 0 has it. Nobody else watches it: whatever becomes of it, the run goes on.

    Its number is the one after the last rank's, by which its files have a place. It may use the CPUs of all ranks,
    which wait for it.

    Parameters
    ----------
    server : Server
        Forks it.
    first : RankSlot
        That of rank 0.

    Attributes
    ----------
    why : str
        Why there is nothing to compare with; empty where there may be.
    """

    def __init__(self, server: Server, first: RankSlot) -> None:
        ranks = first.ranks
        shares = (tuple(sorted({cpu for share in ranks.shares for cpu in share})),) if ranks.shares else ()
        own = Ranks(ranks.size, ranks.size + 1, shares=shares, folder=ranks.folder)
        self.why = ""
        self._told: list[dict[str, Any]] = []
        self._began = time.monotonic()
        self._size, self._timeout = ranks.size, ranks.timeout
        super().__init__(server, RankSlot(own, first.machine, first.host), verbose=None)

    def wait_until_ready(self) -> None:
        """Wait until it has read the payload, for as long as this process has waited for the others."""
        self._wait(lambda: self.ready, lambda: None)

    def next(self, check: Callable[[], None]) -> dict[str, Any] | None:
        """Return what it says of its next backward, or None where it has nothing more to say; see `why`."""
        self._wait(lambda: bool(self._told), check)
        return self._told.pop(0) if self._told else None

    def _wait(self, done: Callable[[], bool], check: Callable[[], None]) -> None:
        came_in = time.monotonic() - self._began
        # The other ranks, which wait meanwhile, do so no longer than the timeout.
        deadline = time.monotonic() + min(_PATIENCE + self._size * came_in, self._timeout / 2)
        while True:
            self._read()
            if self.why or done():
                return
            if self._failure is not None:
                self.why = f"it {self._failure.what}"
            elif self.finished or self._has_ended:
                self.why = "it has ended before"
            elif time.monotonic() > deadline:
                self.why = f"it has taken {deadline - self._began:.0f} s"
            else:
                check()
                wait([*self.sources], 0.1)

    @override
    def _take(self, header: dict[str, Any], content: bytes) -> None:
        if header["kind"] == "backward":
            self._told.append(header)
        elif header["kind"] == "ends":
            self.why = header["why"]
        super()._take(header, content)
