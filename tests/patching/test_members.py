"""Models whose classes override the methods that return parameters and buffers train like others."""

import pytest
import torch
from torch import nn

from nano_loop import nano
from nano_loop.patching.members import buffers_of, named_buffers_of, named_parameters_of, parameters_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.head(self.body(x) * self.scale)


class OfHead(Net):
    def parameters(self):
        return self.head.parameters()


class Groups(Net):
    def parameters(self, recurse=True):
        return [{"params": [*self.body.parameters()], "lr": 0.1}, {"params": [*self.head.parameters()]}]


class WithoutBuffers(Net):
    def buffers(self):
        return []

    def named_buffers(self):
        return {}

    def state_dict(self):
        return {}


@pytest.mark.parametrize("kind", [OfHead, Groups, WithoutBuffers])
def test_all_are_found(kind):
    model = kind()
    assert [name for name, _ in named_parameters_of(model)] == ["body.weight", "body.bias", "head.weight", "head.bias"]
    assert len([*parameters_of(model)]) == 4
    assert [name for name, _ in named_buffers_of(model)] == ["scale"]
    assert [*buffers_of(model)] == [model.scale]


def fit(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(3, 4)).mean() / 256).backward()
        optimizer.step()


OPTIONS = [
    *({"precision": precision} for precision in (32, "bf16", "bf16-true", "bf16-products", 16, 64)),
    {"verify": True},
    {"precision": "bf16", "log_casts": True},
]
CASES = [
    *((kind, options) for kind in (OfHead, Groups, WithoutBuffers) for options in OPTIONS),
    pytest.param(Groups, {"num_processes": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_they_train(kind, options):
    model = kind()
    before = model.body.weight.detach().clone()
    nano(verbose=False, **options)(fit)(model, torch.optim.SGD(parameters_of(model), 0.1))
    assert not torch.equal(model.body.weight, before)
    assert model.body.weight.dtype is torch.float32
