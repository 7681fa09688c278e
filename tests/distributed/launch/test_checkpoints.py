"""Files of checkpoints are rank 0's to write; what workers read back is what rank 0 has written."""

import functools
import io
import pickle
import time

import pytest
import torch
from torch import nn
from torch.serialization import save as save_by_name

from distributed import small
from nano_loop import NanoError, nano
from nano_loop.distributed.launch.checkpoints import Checkpoints, checkpoints_noted

pytestmark = pytest.mark.usefixtures("nothing_left")

two = nano(**small.OPTIONS)


class Slow:
    """Takes a while to be saved."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        time.sleep(0.5)
        return Slow, (self.value,)


def gathered(value):
    values = [None, None]
    torch.distributed.all_gather_object(values, value)
    return values


def test_worker_that_loads_what_it_would_have_saved_waits_for_rank_0(tmp_path):
    def train(model):
        loaded = []
        for epoch in range(2):  # a worker sees neither no file nor the one of the epoch before
            torch.save([Slow(epoch), small.rank()], tmp_path / "best.pt")
            slow, saved_by = torch.load(str(tmp_path / "best.pt"), weights_only=False)
            loaded.append((slow.value, saved_by))
            torch.distributed.barrier()
        return gathered(loaded)

    assert two(train)(nn.Linear(1, 1)) == [[(0, 0), (1, 0)]] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@functools.cache
def found(folder):
    """What two ranks load from what they save in one run. The first test to ask has it run."""

    def train(model, by_name):
        return {
            "more often": saving_more_often(),
            "before": gathered(torch.load(folder / "first.pt") if small.rank() == 1 else "nothing"),
            "memory": gathered([loaded_from_memory(), pickle.loads(pickle.dumps(torch.ones(2) * small.rank()))]),
            "by name": saving_by_name(by_name),
        }

    def saving_more_often():
        for _ in range(1 + small.rank()):  # as where the loss of a rank's own batches decides
            torch.save("best", folder / "best.pt")
        return gathered(torch.load(folder / "best.pt"))

    def loaded_from_memory():
        memory = io.BytesIO()
        torch.save(torch.tensor([1.0 + small.rank()]), memory)
        memory.seek(0)
        return torch.load(memory)

    def saving_by_name(by_name):
        by_name(small.rank(), folder / f"argument {small.rank()}")
        save_by_name(small.rank(), folder / f"imported {small.rank()}")

    torch.save("before", folder / "first.pt")
    before = torch.save, torch.load
    return two(train)(nn.Linear(1, 1), save_by_name) | {"put back": (torch.save, torch.load) == before}


def test_worker_that_saves_more_often_than_rank_0_loads_when_rank_0_does(folder):
    assert found(folder)["more often"] == ["best", "best"]


def test_file_that_was_there_before_is_loaded_without_rank_0(folder):
    assert found(folder)["before"] == ["nothing", "before"]


def test_workers_save_to_memory_and_pickle_tensors(folder):
    saved, pickled = zip(*found(folder)["memory"], strict=True)
    assert [each.tolist() for each in saved] == [[1.0], [2.0]]
    assert [each.tolist() for each in pickled] == [[0.0, 0.0], [1.0, 1.0]]


def test_function_imported_by_name_saves_on_rank_0_alone(folder):
    assert found(folder)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["argument 0", "best.pt", "first.pt", "imported 0"]


def test_sparse_gradients_train_in_a_whole_run():
    def train(model, optimizer):
        model(torch.tensor([small.rank(), 4])).sum().backward()
        optimizer.step()

    model = nn.Embedding(6, 2, sparse=True)
    before = model.weight.detach().clone()
    two(train)(model, torch.optim.SGD(model.parameters(), lr=1.0))
    torch.testing.assert_close((before - model.weight.detach())[:, 0], torch.tensor([0.5, 0.5, 0, 0, 1.0, 0]))


def test_functions_of_torch_are_put_back(folder, tmp_path):
    def fail(model):
        torch.save(1, tmp_path / "saved")
        raise KeyError

    before = torch.save, torch.load
    assert found(folder)["put back"]
    with pytest.raises(KeyError):
        two(fail)(nn.Linear(1, 1))
    assert (torch.save, torch.load) == before


def test_file_that_rank_0_never_saves_is_told_after_the_timeout(tmp_path, monkeypatch):
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    with checkpoints_noted(tmp_path):
        pass
    Checkpoints(tmp_path, timeout=0.1).begin()
    torch.save(1, tmp_path / "best.pt")
    with pytest.raises(NanoError, match=r"best\.pt, which rank 0 has not saved within 0\.1 s"):
        torch.load(tmp_path / "best.pt")
