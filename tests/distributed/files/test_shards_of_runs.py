"""Runs of two ranks that write together: the caller gets both ranks' files, whichever rank is late, and no others."""

import functools
import os
import shutil
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from distributed import small
from nano_loop import nano

pytestmark = pytest.mark.usefixtures("nothing_left")


def state(model):
    return {"model": {name: value.clone() for name, value in model.state_dict().items()}}


def loaded(folder, model, **options):
    """Return the largest difference between the weights of a checkpoint and the model's."""
    read = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(read, checkpoint_id=folder, **options)
    return max((read["model"][name] - value).abs().max().item() for name, value in model.state_dict().items())


def saved(folder, model, rank):
    for _ in range(2):
        dcp.save(state(model), checkpoint_id=folder)
        assert loaded(folder, model) == 0


def saved_in_pieces(folder, model, rank):
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    dcp.save(state(model), storage_writer=writer)


def saved_in_the_background(folder, model, rank):
    future = dcp.async_save(state(model), checkpoint_id=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(9):  # averages gradients meanwhile
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    future.result()
    assert loaded(folder, model) == 0


def renamed_when_complete(folder, model, rank):
    dcp.save(state(model), checkpoint_id=f"{folder}/new")
    os.rename(f"{folder}/new", f"{folder}/ready")
    torch.distributed.barrier()
    assert loaded(f"{folder}/ready", model) == 0


def last_two_kept(folder, model, rank):
    for step in range(4):
        dcp.save(state(model), checkpoint_id=f"{folder}/{step}")
        if step > 1:
            shutil.rmtree(f"{folder}/{step - 2}")


def merged_by_rank_0(folder, model, rank):
    os.makedirs(folder, exist_ok=True)
    for epoch in range(2):
        torch.save((rank, epoch), f"{folder}/{rank}.pt")
        torch.distributed.barrier()
        if rank == 0:
            torch.save([torch.load(f"{folder}/{each}.pt") for each in range(2)], f"{folder}/merged")
        torch.distributed.barrier()
        assert torch.load(f"{folder}/merged") == [(0, epoch), (1, epoch)]


CHECKPOINTS = (saved, saved_in_pieces, saved_in_the_background, renamed_when_complete, last_two_kept)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


@functools.cache
def errors_in_run(folder, late):
    """Return the errors of all ways to write, with one rank late in each; the run is shared by the tests."""

    def train(model):
        errors = {}
        for write in (*CHECKPOINTS, merged_by_rank_0):
            time.sleep(0.2 * (small.rank() == late))
            try:
                write(f"{folder}/{late} late/{write.__name__}", model, small.rank())
            except (Exception, CheckpointException) as error:
                errors[write.__name__] = traceback.format_exception(error)
            torch.distributed.barrier()
        gathered = small.everywhere(errors)
        time.sleep(0.2 * (small.rank() == late))
        torch.save(small.rank(), f"{folder}/at the end of {late} {small.rank()}.pt")
        return gathered

    return nano(**small.OPTIONS)(train)(made())


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("write", [*CHECKPOINTS, merged_by_rank_0])
def test_caller_has_what_all_ranks_wrote_together(write, late, written):
    errors, folder = errors_in_run(written, late), written / f"{late} late" / write.__name__
    assert [each.get(write.__name__) for each in errors] == [None, None]
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if write in CHECKPOINTS:
        found = {"renamed_when_complete": ["ready"], "last_two_kept": ["2", "3"]}.get(write.__name__, ["."])
        assert [loaded(folder / name, made()) for name in found] == [0] * len(found)
        assert {Path(name).parent for name in names} == {Path(name) for name in found}
    else:
        assert names == ["0.pt", "1.pt", "merged"]
        # Written last of all, and moved when rank 0 has returned.
        assert [torch.load(written / f"at the end of {late} {rank}.pt") for rank in range(2)] == [0, 1]
