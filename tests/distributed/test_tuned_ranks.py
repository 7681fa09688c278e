"""All ranks of a run compute in the ways that rank 0 has measured."""

import gc

import pytest
import torch

import nano_loop
from distributed import small
from nano_loop import nano
from nano_loop.steps.tune_operators import TuneOperators


@pytest.mark.usefixtures("nothing_left")
def test_two_processes_compute_as_rank_0_has_measured(measuring):
    def train(model, optimizer, loader):
        for _ in range(10):
            small.fit(model, optimizer, loader)
        mine = [sorted(each._tuner.choices.all()) for each in _steps() if each._tuner is not None]
        return nano_loop.all_gather(torch.tensor([len(each) for each in mine])).tolist(), mine

    counts, (keys,) = nano(**small.OPTIONS | {"precision": "bf16", "fast_convolution": False})(train)(*small.parts())
    assert counts[0] == counts[1] == [len(keys)]
    assert keys


def _steps():
    return [each for each in gc.get_objects() if isinstance(each, TuneOperators)]
