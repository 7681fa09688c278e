"""The digest distinguishes the data that ranks have divided, and ignores other state of the objects."""

import copy
import random
import threading
from collections import deque
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from nano_loop.distributed.sharding.dataset_digest import Digest


def digest(*values):
    return Digest(*values).crc


class Files:
    """A dataset of files, with attributes that differ in every process."""

    def __init__(self, names):
        self.names = names
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(len(names))
        self.load = lambda name: name
        self.me = self


class Opening:
    """Omits open files and caches from the pickled state."""

    def __init__(self, path, handle=None):
        self.path, self.handle = path, handle

    def __getstate__(self):
        return {"path": self.path}


class Record:
    __slots__ = ("label",)

    def __init__(self, label):
        self.label = label


class InMemory:
    """Has its pixels in no attribute, as an image of Pillow does."""

    def __init__(self, pixels):
        self.pixels = lambda: pixels

    def __getstate__(self):
        return self.pixels()


class Table:
    """Has its values in no attribute, as a table of pandas does."""

    __slots__ = ("_shown", "iloc")

    def __init__(self, shown):
        self.iloc, self._shown = None, shown

    def __repr__(self):
        return f"{self._shown} at {id(self):#x}"


LONG = [f"{number}.png" for number in range(100_000)]

ALIKE = {
    "objects": lambda: Files(["a.png", "b.png"]),
    "tensors": lambda: TensorDataset(torch.arange(10.0), torch.zeros(10, 2, dtype=torch.bfloat16)),
    "not contiguous": lambda: torch.arange(12).view(3, 4).t(),
    "arrays": lambda: {"x": np.arange(10), "names": np.array(["a", None], dtype=object)},
    "sets": lambda: {"a", "b", "c"},
    "a holder of itself": lambda: Files({"a", Files([])}),
    "what is not pickled": lambda: Opening("a", {random.random(): object()}),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "empty": lambda: torch.empty(0),
    "tables": lambda: Table("1, 3"),
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_equal_values_have_equal_digests(make):
    assert digest(make()) == digest(make())
    assert digest(make(), 1) != digest(make(), 2)


APART = {
    "indices": lambda rank: Subset([], range(rank, 100, 2)),
    "indices in a list": lambda rank: Subset([], [*range(rank, 100, 2)]),
    "tensors": lambda rank: TensorDataset(torch.arange(100)[rank::2]),
    "long tensors": lambda rank: torch.arange(1 << 20)[rank::2],
    "arrays": lambda rank: np.arange(1 << 20)[rank::2],
    "indices of numpy": lambda rank: Subset([], [*np.arange(100)[rank::2]]),
    "records": lambda rank: Files([Record(label) for label in range(rank, 8, 2)]),
    "images": lambda rank: Files([InMemory(bytes([rank]))]),
    "paths": lambda rank: Files([Path(f"{name}.png") for name in range(rank, 8, 2)]),
    "dates": lambda rank: Files([datetime(2020, 1, 1 + rank)]),
    "bytes": lambda rank: Files([bytearray([rank])]),
    "sets": lambda rank: Files({*range(rank, 8, 2)}),
    "queues": lambda rank: Files(deque(range(rank, 8, 2))),
    "names": lambda rank: Files(["a.png", "b.png"][rank:]),
    "long lists": lambda rank: Files(LONG[rank::2]),
    "numbers": lambda rank: copy.copy(range(rank, 3)),
    "dtypes": lambda rank: torch.zeros(2, dtype=[torch.float32, torch.float64][rank]),
    "classes": lambda rank: [Files([]), copy.copy][rank],
    "tables": lambda rank: Table(["1, 3", "2, 4"][rank]),
}


@pytest.mark.parametrize("make", APART.values(), ids=APART)
def test_what_ranks_have_divided_has_other_digests(make):
    assert digest(make(0)) != digest(make(1))
