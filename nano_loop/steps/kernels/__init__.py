"""The steps that only replace kernels: rows of a table, which one class applies."""

from nano_loop.steps.kernels.kernel_step import step_of
from nano_loop.steps.kernels.table import ROWS

KERNEL_STEPS = tuple(map(step_of, ROWS))
