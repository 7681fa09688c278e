"""Fixtures for tests of steps: a machine of any kind, and a step that is undone after the test."""

import functools
from contextlib import ExitStack

import pytest
import torch

from nano_loop.config.options import Options
from nano_loop.cpu import LogicalCpu, Machine
from nano_loop.distributed.comm.ranks import ALONE
from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.steps.step import StepContext


@pytest.fixture
def machine():
    """Make a machine with the given cores and instruction sets."""

    def make(cores=2, instruction_sets=("avx2", "avx512_bf16"), quota=None):
        cpus = tuple(LogicalCpu(id=number, physical_core=number) for number in range(cores))
        allowed = tuple(range(cores))
        return Machine("A CPU", "x86_64", cpus, allowed, quota=quota, instruction_sets=frozenset(instruction_sets))

    return make


@pytest.fixture
def step(machine):
    """Make a step of a class, with options and a machine; it is undone after the test."""
    with ExitStack() as undoing:

        def make(kind, on=None, ranks=ALONE, **options):
            interceptors = CallInterceptors()
            used = on or machine()
            made = kind(StepContext(Options(**options), used, interceptors, ranks))
            made.apply = functools.partial(_counting_steps, made, made.apply)
            undoing.callback(interceptors.close)
            undoing.callback(made.clock.close)
            undoing.callback(made.undo)
            return made

        yield make


def _counting_steps(made, apply, parts):
    """Apply a step as a run does."""
    made.clock.add(parts.optimizers)
    return apply(parts)


@pytest.fixture
def set_num_threads(monkeypatch):
    """Set torch's number of threads until the test ends, without environment variables."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def nothing_compiled():
    """Start the test with nothing compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
