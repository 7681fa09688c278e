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


def _press():
    signal.raise_signal(signal.SIGINT)


def _press_twice():
    """Send an interrupt now, and another one 0.2 s later, after the end of the run."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    _press()


@pytest.mark.parametrize(
    ("in_loop", "in_cleanup", "caught"),
    [(_press_twice, None, True), (_press_twice, None, False), (None, _press_twice, False), (_press, _press, False)],
    ids=["caught in the loop", "caught by the caller", "in the cleanup", "in both"],
)
def test_second_ctrl_c_leaves_nothing_behind_and_does_not_reach_what_follows(monkeypatch, in_loop, in_cleanup, caught):
    delete = shutil.rmtree

    def train(model):
        if small.rank() == 0 and in_loop:
            with contextlib.suppress(KeyboardInterrupt) if caught else contextlib.nullcontext():
                in_loop()

    def delete_late(folder, *args, **kwargs):
        if in_cleanup and Path(folder).name.startswith("nano_loop-") and Path(folder).suffix != ".gone":
            if in_cleanup is _press_twice:
                monkeypatch.undo()
            in_cleanup()
        delete(folder, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", delete_late)
    handler = signal.getsignal(signal.SIGINT)
    with contextlib.nullcontext() if caught else pytest.raises(KeyboardInterrupt):
        nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1))
    assert signal.getsignal(signal.SIGINT) is handler
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
