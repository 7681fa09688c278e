"""`worker_init` is called in each worker, before anything of the caller's is read, and its errors are named as such."""

import os
import sys
import threading
import types

import pytest
import torch
from torch import nn

from distributed import small
from nano_loop import NanoWorkerError, broadcast, nano

pytestmark = pytest.mark.usefixtures("nothing_left")
NAME = "registered_by_the_program"


def register():
    """Make a module that only this program has, and change what it inherits."""
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
    def train(model, thing):  # which is sent by the name of a module that no file holds
        return broadcast((torch.patched, thing(), os.getpid()), 1)

    patched, calls, pid = train(nn.Linear(1, 1), registered.Registered())
    assert patched
    assert calls == [pid], "called once in each worker"
    assert sys.modules[NAME].calls == [os.getpid()], "and not in the caller's process"


def fails():
    raise LookupError("no such library")


def exits():
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fails, "rank 1 raised LookupError: no such library in worker_init: a run needs all of its ranks"),
        (exits, r"rank 1 called sys.exit\(3\) in worker_init: .*Return from worker_init instead"),
    ],
)
def test_exception_in_it_names_it_and_the_rank(function, words):
    with pytest.raises(NanoWorkerError, match=words) as caught:
        nano(**small.OPTIONS, worker_init=function)(lambda model: None)(nn.Linear(1, 1))
    assert caught.value.rank == 1
    assert f"in {function.__name__}" in caught.value.traceback


def test_function_that_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(
        NanoWorkerError, match=r"argument `worker_init`, its closure variable `lock`, is a _thread.lock"
    ):
        nano(**small.OPTIONS, worker_init=lambda: lock)(lambda model: None)(nn.Linear(1, 1))


def test_one_process_needs_no_initialization():
    assert nano(verbose=False, worker_init=fails)(lambda model: 3)(nn.Linear(1, 1)) == 3
