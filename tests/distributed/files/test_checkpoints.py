"""Checkpoints with several processes: rank 0 saves the caller's files, and a worker loads those it has saved."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed import small
from nano_loop import nano

pytestmark = pytest.mark.usefixtures("nothing_left")


class Cached(Dataset):
    """Caches each sample in a file at its first access, and returns whether the file existed."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 6

    def __getitem__(self, index):
        file = self.folder / f"{index}.pt"
        found = file.exists()
        if not found:
            torch.save(torch.full((1 << 12,), index), file)
        return torch.load(file)[0].item(), found, torch.rand(1 << 16)


def test_each_rank_has_what_it_has_saved_by_functions_that_were_passed_and_in_workers_of_a_loader(tmp_path):
    folder = tmp_path

    def train(model, save, rename, opened):
        own = ("first", "second")[small.rank()]
        save(small.rank(), folder / f"argument {own}")
        with opened(folder / f"new {own}", "w") as file:
            file.write("x")
        rename(file.name, folder / f"opened {own}")
        return small.everywhere((os.listdir(folder), loading() if small.rank() == 1 else None))

    @torch.no_grad()  # a loader is divided otherwise, and only one rank iterates over it
    def loading():
        (folder / "cache").mkdir()
        samples = Cached(folder / "cache")
        epochs = [[*DataLoader(samples, num_workers=1, batch_size=None)] for _ in range(2)]
        return [[[each[0] for each in epoch], [each[1] for each in epoch]] for epoch in epochs]

    (of_first, _), (of_second, epochs) = nano(**small.OPTIONS)(train)(nn.Linear(1, 1), torch.save, os.replace, open)
    assert {"argument second", "opened second"} <= set(of_second)
    assert {"argument first", "opened first"} <= set(of_first)
    assert sorted(path.name for path in folder.iterdir()) == ["argument first", "opened first"]
    read = [*range(6)]
    assert epochs == [[read, [False] * 6], [read, [True] * 6]], "a loader's workers write to the folder of their rank"
