"""What CPUs this process may use: read from the machine, or from a recording of one."""

from nano_loop.cpu.cpu_list import format_cpu_list, parse_cpu_list
from nano_loop.cpu.host import Host
from nano_loop.cpu.machine import LogicalCpu, Machine
from nano_loop.cpu.reading import read_machine

__all__ = ["Host", "LogicalCpu", "Machine", "format_cpu_list", "parse_cpu_list", "read_machine"]
