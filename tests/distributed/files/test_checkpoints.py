"""Checkpoints under several processes: rank 0 saves the caller's, and a worker loads what it has saved itself."""

import functools
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


def gathered(value):
    values = [None, None]
    torch.distributed.all_gather_object(values, value)
    return values


class Cached(Dataset):
    """Writes each sample to a file when it is first asked for, and says whether it has found one."""

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@functools.cache
def found(folder):
    """What two ranks load from what they save in one run. The first test to ask has it run."""

    def train(model, by_name, rename, opened):
        return {
            "more often": saving_more_often(),
            "rank 0's": saved_by_rank_0(),
            "by name": saving_by_name(by_name, rename, opened),
            "loader": gathered(loading() if small.rank() == 1 else None),
        }

    def saving_more_often():
        for time in range(1 + small.rank()):  # as where the loss of a rank's own batches decides
            torch.save(time, folder / "often.pt")
        return gathered(torch.load(folder / "often.pt"))

    def saved_by_rank_0():
        if small.rank() == 0:
            torch.save("rank 0's", folder / "guarded.pt")
        torch.distributed.barrier()
        return gathered(torch.load(folder / "guarded.pt"))

    def saving_by_name(by_name, rename, opened):
        own = ("first", "second")[small.rank()]
        by_name(small.rank(), folder / f"argument {own}")
        save_by_name(small.rank(), folder / f"imported {own}")
        with opened(folder / f"new {own}", "w") as file:
            file.write("x")
        rename(file.name, folder / f"opened {own}")
        return gathered(sorted(os.listdir(folder)))

    @torch.no_grad()  # for one rank alone iterates the loader, which is divided otherwise
    def loading():
        (folder / "cache").mkdir()
        samples = Cached(folder / "cache")
        epochs = [[*DataLoader(samples, num_workers=1, batch_size=None)] for _ in range(2)]
        return [[[each[0] for each in epoch], [each[1] for each in epoch]] for epoch in epochs]

    return two(train)(nn.Linear(1, 1), save_by_name, os.replace, open)


def test_worker_that_saves_more_often_than_rank_0_loads_its_own(folder):
    assert found(folder)["more often"] == [0, 1]


def test_file_that_rank_0_alone_has_saved_is_loaded_from_there(folder):
    assert found(folder)["rank 0's"] == ["rank 0's"] * 2


def test_functions_that_travel_write_private_copies_in_a_worker(folder):
    by_name = found(folder)["by name"]
    assert {"argument second", "imported second", "opened second"} <= set(by_name[1])
    assert {"argument first", "imported first", "opened first"} <= set(by_name[0])
    files = ["argument first", "guarded.pt", "imported first", "often.pt", "opened first"]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == files


def test_loader_workers_write_to_the_folder_of_their_rank_and_share_tensors(folder):
    first, second = found(folder)["loader"][1]
    assert first == [[*range(6)], [False] * 6]
    assert second == [[*range(6)], [True] * 6]
    assert not (folder / "cache").exists()
