"""Ctrl-C in a run is one interrupt, reaches the loop's handler, and leaves nothing behind."""

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from distributed import small
from nano_loop import nano

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_second_ctrl_c_while_a_run_is_cleaned_up_leaves_nothing_behind(monkeypatch):
    delete = shutil.rmtree

    def delete_late(folder, *args, **kwargs):
        if "nano_loop-" in Path(folder).name and Path(folder).suffix != ".gone":  # the final deletion
            signal.raise_signal(signal.SIGINT)
        delete(folder, *args, **kwargs)

    def train(model):
        if small.rank() == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(shutil, "rmtree", delete_late)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1))
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_pressed_twice_is_one_interrupt():
    def train(model, heard):
        if small.rank() == 0:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                heard.append("never")
            signal.raise_signal(signal.SIGINT)
            heard.append("still here")
            time.sleep(0.6)
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                heard.append("never")

    heard = []
    nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1), heard)
    assert heard == ["still here"]


def _press_twice():
    """Send an interrupt now, and another one 0.2 s later, after the end of the run."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("caught", ["in the loop", "by the caller", "by the caller, in the cleanup"])
def test_second_ctrl_c_of_one_does_not_reach_what_follows_the_run(monkeypatch, caught):
    delete = shutil.rmtree

    def train(model):
        if small.rank() == 0 and "cleanup" not in caught:
            with contextlib.suppress(KeyboardInterrupt) if "loop" in caught else contextlib.nullcontext():
                _press_twice()

    def delete_late(folder, *args, **kwargs):
        if "cleanup" in caught and Path(folder).name.startswith("nano_loop-") and Path(folder).suffix != ".gone":
            monkeypatch.undo()
            _press_twice()
        delete(folder, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", delete_late)
    with contextlib.nullcontext() if "loop" in caught else pytest.raises(KeyboardInterrupt):
        nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1))
    for _ in range(50):
        time.sleep(0.01)  # time for a user to save results


def test_run_ends_while_processes_of_a_loader_are_alive():
    def train(model, loader):
        batches = iter(loader)  # its workers inherit all descriptors, and live as long as it does
        next(batches)
        return batches

    model, _, loader = small.parts()
    loader = torch.utils.data.DataLoader(loader.dataset, batch_size=4, num_workers=1)
    assert len(list(nano(**small.OPTIONS)(train)(model, loader))) == 3


@pytest.mark.slow
def test_interrupts_that_the_loop_handles_end_nothing():
    def train(model, heard):
        if small.rank() == 0:
            try:
                signal.raise_signal(signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                heard.append("raised")
            signal.signal(signal.SIGINT, lambda number, frame: heard.append("handled"))
            signal.raise_signal(signal.SIGINT)
        time.sleep(3)
        distributed.barrier()
        return signal.getsignal(signal.SIGINT)

    before, heard = signal.getsignal(signal.SIGINT), []
    try:
        handler = nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1), heard)
        assert signal.getsignal(signal.SIGINT) is handler
        handler(signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == ["raised", "handled", "handled"]
