"""Streams and events on the CPU, where each operation is done when its call returns."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stream(torch.cpu.Stream):
    """A stream whose work is always complete. It is a context manager, like the result of `torch.cuda.stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__(priority)
        self.device = device
        self.priority = priority
        self.cuda_stream = 0

    def synchronize(self) -> None:
        """Return: nothing is under way."""

    def query(self) -> bool:
        """Return True: all is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Record an event, or a new one, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Go on."""


class Event(torch.cpu.Event):
    """A point in time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.recorded: float | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self.recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to another.

        Raises
        ------
        RuntimeError
            If one of them is not recorded yet, as from torch.
        """
        if self.recorded is None or end_event.recorded is None:
            raise RuntimeError("elapsed_time: both events must be recorded. Call record() on each of them first.")
        return (end_event.recorded - self.recorded) * 1e3
