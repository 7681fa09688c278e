"""Events like those of torch.profiler, with the attributes that nano_loop reads."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Event:
    name: str
    self_cpu_time_total: float = 1.0
    cpu_time_total: float = 1.0
    cpu_parent: Any = None
    thread: int = 1
