"""The CPUs that this process may use, their division among processes, and the binding of threads."""

from nano_loop.cpu.binding import bound
from nano_loop.cpu.cpu_list import format_cpu_list
from nano_loop.cpu.machine import LogicalCpu, Machine
from nano_loop.cpu.partition import Share, given_shares, partition, process_counts, restricted
from nano_loop.cpu.process_memory import memory_left, peak_memory, resident_memory
from nano_loop.cpu.reading import read_machine

__all__ = [
    "LogicalCpu",
    "Machine",
    "Share",
    "bound",
    "format_cpu_list",
    "given_shares",
    "memory_left",
    "partition",
    "peak_memory",
    "process_counts",
    "read_machine",
    "resident_memory",
    "restricted",
]
