"""The CPUs that this process may use, their division among processes, and the binding of threads."""

from nano_loop.cpu.binding import bound
from nano_loop.cpu.machine import LogicalCpu, Machine
from nano_loop.cpu.partition import Share, given_shares, partition, process_counts, restricted
from nano_loop.cpu.process import memory_left, peak_memory, resident_memory
from nano_loop.cpu.reading import read_machine
from nano_loop.cpu.tree import format_cpu_list

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
