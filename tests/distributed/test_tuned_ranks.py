"""All ranks of a run use the kernels that rank 0 has selected by measurement."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nano_loop
from distributed import small
from nano_loop import nano
from nano_loop.cpu import read_machine
from nano_loop.patching.operators import gives_kernels
from nano_loop.steps.tune_operators import TuneOperators


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.skipif(not (gives_kernels() and read_machine().has_fast_bf16), reason="it needs torch 2.9, and bf16")
def test_two_processes_compute_as_rank_0_has_measured(measuring):
    def train(model, optimizer, loader):
        for _ in range(10):
            small.fit(model, optimizer, loader)
        mine = [sorted(each._tuner.choices.all()) for each in _steps() if each._tuner is not None]
        return nano_loop.all_gather(torch.tensor([len(each) for each in mine])).tolist(), mine

    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1)), torch.rand(2048, 256)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    counts, (keys,) = nano(**small.OPTIONS | {"precision": "auto"})(train)(model, optimizer, loader)
    assert counts[0] == counts[1] == [len(keys)]
    assert keys


def _steps():
    return [each for each in gc.get_objects() if isinstance(each, TuneOperators)]
