"""Each worker calls `worker_init` before it reads any of the caller's objects; tests/faults covers its errors."""

import os
import sys
import types

import pytest
import torch
from torch import nn

from distributed import small
from nano_loop import broadcast, nano

pytestmark = pytest.mark.usefixtures("nothing_left")
NAME = "registered_by_the_program"


def register():
    """Register a module that has no file, and change an inherited value."""
    module = types.ModuleType(NAME)
    module.calls = [os.getpid()]
    module.Registered = type("Registered", (), {"__module__": NAME, "__call__": lambda self: sys.modules[NAME].calls})
    sys.modules[NAME] = module
    torch.patched = True


@pytest.fixture
def registered():
    register()
    yield sys.modules[NAME]
    del sys.modules[NAME], torch.patched


def test_each_worker_has_called_it_before_it_reads_the_arguments(registered):
    @nano(**small.OPTIONS, worker_init=register)
    def train(model, thing):  # sent by name, from a module without a file
        return broadcast((torch.patched, thing(), os.getpid()), 1)

    patched, calls, pid = train(nn.Linear(1, 1), registered.Registered())
    assert patched
    assert calls == [pid], "called once in each worker"
    assert sys.modules[NAME].calls == [os.getpid()], "and not in the caller's process"


def fail():
    raise LookupError("no such library")


def test_one_process_needs_no_initialization():
    assert nano(verbose=False, worker_init=fail)(lambda model: 3)(nn.Linear(1, 1)) == 3
