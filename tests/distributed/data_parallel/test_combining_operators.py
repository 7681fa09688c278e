"""Calls of operators that mix rows of a share are noted with the program's line, and calls within rows are not."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from distributed.split_batches.loops import needs_kernels
from nano_loop.distributed.comm.ranks import RunContext
from nano_loop.distributed.comm.split_batches import Share, SplitBatches
from nano_loop.distributed.data_parallel.combining_operators import _ADDING, _NODES, calls_noted
from nano_loop.distributed.data_parallel.sample_weights import SampleWeights

pytestmark = needs_kernels
SAMPLES = 4
SHARE = Share(4, 8, 8, 2)
TABLE = nn.Parameter(torch.rand(SAMPLES, 3, generator=torch.Generator().manual_seed(1)))
ORDER = torch.tensor([1, 2, 3, 0])


def noted(compute, share=SHARE, rows=SAMPLES, was_compared=True):
    """Return the calls that are noted once gradients were compared."""
    context = RunContext()
    context.split = SplitBatches()
    context.split.share = share
    weights = SampleWeights()
    weights.was_compared = was_compared
    with calls_noted(context, weights.note_call):
        compute(torch.rand(rows, 5, 3))
    return [*weights._lines]


COMBINING = {
    "flip": lambda x: x.flip(0),
    "flip of two dimensions": lambda x: x.flip(-1, -3),
    "roll": lambda x: x.roll(1, 0),
    "roll as a vector": lambda x: x.roll(1),
    "index": lambda x: x[ORDER],
    "part of samples": lambda x: x[ORDER, :2],
    "repeated": lambda x: x[torch.zeros(SAMPLES, dtype=torch.long)],
    "negative": lambda x: x[torch.arange(SAMPLES) - 1],
    "index_select": lambda x: x.index_select(0, ORDER),
    "gather": lambda x: x.gather(0, ORDER[:, None, None].expand_as(x)),
    "take_along_dim": lambda x: x.take_along_dim(ORDER[:, None, None], 0),
    "sort": lambda x: x.sort(dim=0),
    "ranks": lambda x: x[:, 0, 0].argsort(),
    "best samples": lambda x: x.topk(2, 0),
    "rank": lambda x: x[:, 0, 0].kthvalue(2),
    "median of samples": lambda x: x.median(0),
    "most frequent": lambda x: ORDER.mode(),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(-3),
    "deviation": lambda x: x.std(0),
    "variance of all": lambda x: x.var(),
    "quantile": lambda x: x[:, 0, 0].quantile(0.3),
    "median": lambda x: x[:, 0, 0].median(),
    "counts": lambda x: ORDER.bincount(),
    "slices": lambda x: torch.cat([x[1:], x[:1]]),
    "halves": lambda x: torch.cat([*reversed(x.chunk(2))]),
}


@pytest.mark.parametrize("name", COMBINING)
def test_calls_that_mix_rows_are_noted(name):
    assert any("in test_combining_operators.py:" in line for line in noted(COMBINING[name]))


WITHIN = {
    "flip of images": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, 2),
    "order of columns": lambda x: x[:, [2, 1, 0]],
    "own column": lambda x: x[torch.arange(SAMPLES), torch.tensor([1, 0, 4, 2])],
    "mask": lambda x: x[x[:, 0, 0] > 0.5],
    "some samples": lambda x: x[ORDER[:2]],
    "table": lambda x: TABLE[ORDER] + TABLE.flip(0),
    "words": lambda x: TABLE[ORDER.expand(7, SAMPLES)],
    "gather": lambda x: x.gather(1, ORDER[:, None, None].clamp(max=2)),
    "sort": lambda x: x.sort(dim=1),
    "best classes": lambda x: x.topk(2),
    "cumsum": lambda x: x.cumsum(-1),
    "deviation": lambda x: x.std((1, 2)),
    "mean": lambda x: x.mean(0),
    "slices in order": lambda x: torch.cat([x[:1], x[1:]]),
    "columns": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "other tensors": lambda x: torch.cat([x[2:], x.clone()[:2]]),
}


@pytest.mark.parametrize("name", WITHIN)
def test_calls_within_rows_combine_none(name):
    assert noted(WITHIN[name]) == []


def test_nodes_have_the_names_of_operators():
    names = {name.rstrip("0123456789") for name in dir(torch._C._functions)}
    newer = {"AminmaxBackward"} - names  # torch 2.9 has no derivative of it
    assert _NODES - names == {"BincountBackward"} | newer  # bincount has no gradient
    assert names >= _ADDING


def test_call_under_a_mode_of_the_program_is_noted():
    def flipped(x):
        with torch.device("cpu"):
            x.flip(0)

    assert any("flip in test_combining_operators.py:" in line for line in noted(flipped))


def test_library_that_sorts_samples_is_not_noted():
    assert noted(lambda x: pack_padded_sequence(x, torch.tensor([1, 3, 2, 5]), True, enforce_sorted=False)) == []


def backward_of_flip(x):
    """The backward of a flip is a flip."""
    x.requires_grad_().flip(0).sum().backward()


def test_calls_outside_of_the_loops_forward_are_not_noted():
    assert len(noted(backward_of_flip)) == 1
    assert noted(COMBINING["flip"], share=None) == []
    assert noted(COMBINING["flip"], share=Share(0, 1, 1, 2)) == []  # all ranks compute the whole batch
    assert noted(COMBINING["flip"], rows=SAMPLES + 1) == []


class Median(torch.optim.Optimizer):
    """Combines the rows of a gradient, of which there may be as many as samples."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._update(torch.ones(SAMPLES, 3))

    def _update(self, gradient):
        gradient.median(0)


def test_calls_of_an_optimizer_are_not_noted_and_those_of_its_closure_are():
    optimizer = Median([nn.Parameter(torch.ones(3))], {})
    assert noted(lambda x: optimizer.step()) == []
    assert len(noted(lambda x: optimizer.step(lambda: x.flip(0)))) == 1


def test_all_lines_are_noted_until_gradients_are_compared():
    assert len(noted(COMBINING["flip"], rows=SAMPLES + 1, was_compared=False)) == 1
