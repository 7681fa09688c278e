"""What torch.distributed's functions return in a run on one host: handles of what is done, and of what is under way."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.futures import Future

from nano_loop.distributed.transport.pipes import Pipes, Transfer


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

    def is_success(self) -> bool:
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


class UnderWay(distributed.Work):
    """A message that is being sent or received."""

    def __init__(self, pipes: Pipes, transfer: Transfer, tensor: torch.Tensor, source: int) -> None:
        super().__init__()
        self._pipes, self._transfer, self._tensor, self._source = pipes, transfer, tensor, source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the other rank."""
        self._pipes.finish(self._transfer)
        return True

    def is_completed(self) -> bool:
        """Carry it on, and return whether it is done."""
        self._pipes.advance()
        return self._transfer.done

    def is_success(self) -> bool:
        """Return whether it is done."""
        return self._transfer.done

    def result(self) -> Any:
        """Return the tensor."""
        return [self._tensor]

    def get_future(self) -> Any:
        """Wait for the other rank, and return a future that is complete."""
        self.wait()
        return Done([self._tensor]).get_future()

    def _source_rank(self) -> int:
        return self._source
