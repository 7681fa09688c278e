"""Faults: processes of one rank's loader exit, raise or hang."""

import os
import time

import pytest
import torch
from distributed import small
from torch.utils.data import DataLoader, Dataset

from faults.fault import Fault
from faults.runs import OPTIONS, raising
from nano_loop import NanoWarning, nano


class Rows(Dataset):
    """Calls `do` for one row, in the processes of one rank's loader."""

    def __init__(self, do, rank):
        self.do, self.rank, self.mine = do, rank, None

    def __len__(self):
        return 32

    def __getitem__(self, row):
        if self.mine == self.rank and row >= 16:
            self.do()
        return torch.ones(3) * row, torch.ones(1)


def _loaded(rank, do, processes=1, **settings):
    """Return a function that trains with loader processes, in which `rank` calls `do`."""

    def fit(model, optimizer, loader):
        loader.dataset.mine = small.rank()
        return small.fit(model, optimizer, loader, epochs=1)

    def commit():
        model, optimizer, _ = small.parts()
        nano(**OPTIONS)(fit)(model, optimizer, DataLoader(Rows(do, rank), 4, num_workers=processes, **settings))

    return commit


class NextRows(Dataset):
    def __init__(self):
        self.row = 0

    def __len__(self):
        return 32

    def __getitem__(self, index):
        self.row += 1
        return torch.ones(3) * self.row, torch.ones(1)


def _next_rows():
    model, optimizer, _ = small.parts()
    with pytest.warns(NanoWarning, match="each of the 2 ranks computes the same batches"):
        nano(**OPTIONS)(small.fit)(model, optimizer, DataLoader(NextRows(), 4), epochs=3)


def _ended(end):
    """Return a function that ends a loader's process while its owner waits for it.

    torch reads a tensor from the process that sent it. If that process dies meanwhile, torch's signal handler raises
    anywhere, and leaves processes and threads behind, even in a plain loop.
    """

    def do():
        time.sleep(0.5)  # until the earlier batches have been read
        end()

    return do


# torch leaves this folder of sockets if a loader's process is killed, even in a plain loop.
_TORCHS = ("temporary pymp-",)
# torch opens ten temporary files to check for free descriptors. The signal of a child's death can arrive during this;
# the handler then raises, and the file stays, even in a plain loop.
_TORCHS_FILE = ("temporary tmp", "descriptors ")

FAULTS = [
    Fault("a dataset returns its next row, whatever the index", _next_rows),
    Fault(
        "a dataset raises in a worker",
        _loaded(1, raising(ConnectionResetError, 104, "the database is gone"), processes=0),
    ),
    Fault("a loader's process raises on a worker", _loaded(1, raising(ValueError, "row 16 is bad")), quick=True),
    Fault("a loader's process raises on rank 0", _loaded(0, raising(ValueError, "row 16 is bad")), leaves=_TORCHS),
    Fault("a loader's process dies on a worker", _loaded(1, _ended(lambda: os._exit(7)))),
    Fault(
        "a loader's process dies on rank 0", _loaded(0, _ended(lambda: os._exit(7))), leaves=(*_TORCHS, *_TORCHS_FILE)
    ),
    Fault("a loader's process is killed on a worker", _loaded(1, _ended(lambda: os.kill(os.getpid(), 9)))),
    Fault(
        "a loader's process hangs on a worker, and the loader has a timeout",
        _loaded(1, lambda: time.sleep(30), timeout=1),
    ),
    Fault(
        "a loader's process hangs on rank 0, and the loader has a timeout",
        _loaded(0, lambda: time.sleep(30), timeout=1),
        leaves=_TORCHS,
    ),
]
