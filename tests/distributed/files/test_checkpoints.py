"""Checkpoints with several processes: rank 0 saves the caller's files, and a worker loads those it has saved."""

import os

import pytest
import torch
from torch import nn
from torch.serialization import save as save_by_name
from torch.utils.data import DataLoader, Dataset

from distributed import small
from nano_loop import nano

pytestmark = pytest.mark.usefixtures("nothing_left")

two = nano(**small.OPTIONS)


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


def test_each_rank_has_what_it_has_saved_by_functions_of_other_names_and_in_workers_of_a_loader(tmp_path):
    folder = tmp_path

    def train(model, by_name, rename, opened):
        return {
            "by name": saving_by_name(by_name, rename, opened),
            "loader": small.everywhere(loading() if small.rank() == 1 else None),
        }

    def saving_by_name(by_name, rename, opened):
        own = ("first", "second")[small.rank()]
        by_name(small.rank(), folder / f"argument {own}")
        save_by_name(small.rank(), folder / f"imported {own}")
        with opened(folder / f"new {own}", "w") as file:
            file.write("x")
        rename(file.name, folder / f"opened {own}")
        return small.everywhere(sorted(os.listdir(folder)))

    @torch.no_grad()  # a loader is divided otherwise, and only one rank iterates over it
    def loading():
        (folder / "cache").mkdir()
        samples = Cached(folder / "cache")
        epochs = [[*DataLoader(samples, num_workers=1, batch_size=None)] for _ in range(2)]
        return [[[each[0] for each in epoch], [each[1] for each in epoch]] for epoch in epochs]

    found = two(train)(nn.Linear(1, 1), save_by_name, os.replace, open)
    by_name = found["by name"]
    assert {"argument second", "imported second", "opened second"} <= set(by_name[1])
    assert {"argument first", "imported first", "opened first"} <= set(by_name[0])
    files = ["argument first", "imported first", "opened first"]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == files
    first, second = found["loader"][1]
    assert first == [[*range(6)], [False] * 6], "a loader's workers write to the folder of their rank"
    assert second == [[*range(6)], [True] * 6]
    assert not (folder / "cache").exists()
