"""Files of checkpoints are rank 0's to write; what workers read back is what rank 0 has written."""

import contextlib
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


def test_worker_that_saves_more_often_than_rank_0_loads_when_rank_0_does(tmp_path):
    def train(model):
        for _ in range(1 + small.rank()):  # as where the loss of a rank's own batches decides
            torch.save("best", tmp_path / "best.pt")
        return gathered(torch.load(tmp_path / "best.pt"))

    assert two(train)(nn.Linear(1, 1)) == ["best", "best"]


def test_file_that_was_there_before_is_loaded_without_rank_0(tmp_path):
    torch.save("before", tmp_path / "first.pt")

    def train(model):
        loaded = torch.load(tmp_path / "first.pt") if small.rank() == 1 else "nothing"
        return gathered(loaded)

    assert two(train)(nn.Linear(1, 1)) == ["nothing", "before"]


def test_workers_save_to_memory_and_pickle_tensors(tmp_path):
    def train(model):
        memory = io.BytesIO()
        torch.save(torch.tensor([1.0 + small.rank()]), memory)
        memory.seek(0)
        return gathered([torch.load(memory), pickle.loads(pickle.dumps(torch.ones(2) * small.rank()))])

    saved, pickled = zip(*two(train)(nn.Linear(1, 1)), strict=True)
    assert [each.tolist() for each in saved] == [[1.0], [2.0]]
    assert [each.tolist() for each in pickled] == [[0.0, 0.0], [1.0, 1.0]]


def test_sparse_gradients_train_in_a_whole_run():
    def train(model, optimizer):
        model(torch.tensor([small.rank(), 4])).sum().backward()
        optimizer.step()

    model = nn.Embedding(6, 2, sparse=True)
    before = model.weight.detach().clone()
    two(train)(model, torch.optim.SGD(model.parameters(), lr=1.0))
    torch.testing.assert_close((before - model.weight.detach())[:, 0], torch.tensor([0.5, 0.5, 0, 0, 1.0, 0]))


def test_function_imported_by_name_saves_on_rank_0_alone(tmp_path):
    def train(model, by_name):
        by_name(small.rank(), tmp_path / f"argument {small.rank()}")
        save_by_name(small.rank(), tmp_path / f"imported {small.rank()}")

    two(train)(nn.Linear(1, 1), save_by_name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["argument 0", "imported 0"]


def test_functions_of_torch_are_put_back(tmp_path):
    def train(model, fails):
        torch.save(1, tmp_path / "saved")
        if fails:
            raise KeyError

    before = torch.save, torch.load
    for fails in (False, True):
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            two(train)(nn.Linear(1, 1), fails)
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
