"""Fused kernels step small parameters with one thread: starting threads would take longer."""

import dataclasses

import pytest
import torch
from torch import nn

from nano_loop.kernels.build import why_none
from nano_loop.optimizers import direct_steps
from nano_loop.optimizers.direct_steps import stepped_directly
from nano_loop.optimizers.torch_fused_steps import steps_fused

SMALL, LARGE = 1000, 1 << 16
KINDS = [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def stepped(kind, sizes, context):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    optimizer = kind(parameters, lr=0.1)
    with context(optimizer):
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    return parameters


@pytest.fixture
def calls(monkeypatch):
    """Record the threads and the sizes of parameters of each call of a fused kernel."""
    made = []

    def recorded(rule):
        def by_torch(parameters, *lists, **settings):
            made.append((torch.get_num_threads(), [parameter.numel() for parameter in parameters]))
            rule.by_torch(parameters, *lists, **settings)

        return dataclasses.replace(rule, by_torch=by_torch)

    rules = {kind: recorded(rule) for kind, rule in direct_steps._RULES.items()}
    monkeypatch.setattr(direct_steps, "_RULES", rules)
    return made


@pytest.mark.skipif(why_none() is not None, reason="C functions do not use torch's threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([SMALL, 7], [(1, [SMALL, 7])]),
        ([LARGE], [(2, [LARGE])]),
        ([SMALL, LARGE, 7], [(1, [SMALL, 7]), (2, [LARGE])]),
    ],
)
def test_small_parameters_are_stepped_by_one_thread_with_the_same_bits(calls, kind, sizes, expected):
    by_torch = stepped(kind, sizes, steps_fused)
    assert all(map(torch.equal, by_torch, stepped(kind, sizes, stepped_directly)))
    assert calls[-len(expected) :] == expected
    assert torch.get_num_threads() == 2
