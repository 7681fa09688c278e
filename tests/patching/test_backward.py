"""Work deferred to the end of the outermost backward; see `tests/distributed/data_parallel` for averaged gradients."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nano_loop.patching.calls.backward import at_end_of_backward, nested_backwards_noticed

PLAIN = torch.autograd.backward


@pytest.fixture(autouse=True)
def noticing():
    with nested_backwards_noticed():
        yield
    assert torch.autograd.backward is PLAIN


def weight_that_asks(log, name):
    """Return a parameter that logs its gradient's arrival, and a line at the end of the backward."""
    weight = torch.nn.Parameter(torch.ones(2))

    def arrived(parameter):
        log.append(name)
        at_end_of_backward(lambda: log.append(f"end, asked by {name}"))

    weight.register_post_accumulate_grad_hook(arrived)
    return weight


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the first forward is without gradients
def test_a_checkpoint_in_a_checkpoint_leaves_it_to_the_outermost():
    log = []
    inner, outer, first = (weight_that_asks(log, name) for name in ("inner", "outer", "first"))

    def segment(x):
        return checkpoint(lambda x: x * inner, x * outer, use_reentrant=True)

    checkpoint(segment, first * 2, use_reentrant=True).sum().backward()
    assert log[:3] == ["inner", "outer", "first"]
    assert sorted(log[3:]) == ["end, asked by first", "end, asked by inner", "end, asked by outer"]


def test_backward_that_fails_runs_nothing_and_leaves_nothing_behind():
    log = []
    weight = weight_that_asks(log, "a")
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: 1 / 0)
    hidden = checkpoint(lambda x: x * weight, x.clone(), use_reentrant=True)
    with pytest.raises(ZeroDivisionError):
        hidden.sum().backward()
    assert log == ["a"]
    weight.sum().backward()
    assert log == ["a", "a", "end, asked by a"]
