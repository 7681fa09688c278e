"""However a loop writes files, the caller's folder holds rank 0's files, and a worker reads its own back."""

import functools
import os

import pytest
import torch
from torch import nn

from distributed import small
from distributed.files.writers import ADDING, WRITERS, prepare, written
from nano_loop import nano

pytestmark = pytest.mark.usefixtures("nothing_left")


def contents(folder):
    return {str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*"))}


def content(path):
    if path.is_symlink():
        return os.readlink(path)
    if path.name == "legacy.pt":  # contains addresses
        return torch.load(path).tolist()
    return path.read_bytes() if path.is_file() else None


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Make folders for a run whose worker is ahead, for one whose worker lags behind, and for this process."""
    made = {}
    for name in ("ahead", "behind", 0, 1, "one after the other"):
        made[name] = tmp_path_factory.mktemp("written") / "folder"
        prepare(made[name])
    return made


@functools.cache
def read_back(folder, first):
    """Return the values that each writer reads back on each rank, when one rank writes first."""

    def train(model):
        results = {}
        for name in WRITERS:
            for rank in (first, 1 - first):
                if small.rank() == rank:
                    results[name] = written(name, folder, rank)
                torch.distributed.barrier()
        gathered = [None, None]
        torch.distributed.all_gather_object(gathered, results)
        return gathered

    return nano(**small.OPTIONS)(train)(nn.Linear(1, 1))


@functools.cache
def alone(folder, name, *values):
    """Return the values read back in one process that writes the values one after the other."""
    return [written(name, folder, value).replace(str(folder), "") for value in values][-1]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("worker", ["ahead", "behind"])
def test_files_are_rank_0s_and_a_worker_reads_its_own(name, worker, folders):
    found = read_back(folders[worker], int(worker == "ahead"))
    ours, theirs = (each[name].replace(str(folders[worker]), "") for each in found)
    assert ours == alone(folders[0], name, 0)
    if worker == "behind" and name in ADDING:
        assert theirs == alone(folders["one after the other"], name, 0, 1)
    else:
        assert theirs == alone(folders[1], name, 1)
    assert contents(folders[worker] / name) == contents(folders[0] / name)
