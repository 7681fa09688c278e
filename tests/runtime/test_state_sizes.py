"""The states of optimizers are known before their first step makes them."""

from typing import Any

import pytest
import torch
from torch import nn

from nano_loop.runtime.state_sizes import bytes_of_coming_states, bytes_of_states, bytes_of_temporaries

OPTIMIZERS = {
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "SGD": {"momentum": 0.9, "lr": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.1},
    "Adadelta": {},
    "Adagrad": {},
    "Rprop": {},
    "ASGD": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_known_before_they_are_made(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    kind = getattr(torch.optim, name)

    class Own(kind):  # a common pattern
        def step(self, closure=None):
            return super().step(closure)

    for each in (kind, Own):
        optimizer = each(model.parameters(), **OPTIMIZERS[name])
        before = bytes_of_states(optimizer)
        coming = bytes_of_coming_states(optimizer)
        model(torch.rand(2, 64)).sum().backward()
        optimizer.step()
        assert before + coming == pytest.approx(bytes_of_states(optimizer), rel=0.05, abs=600)
        assert bytes_of_coming_states(optimizer) == 0


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.AdamW, {}, 0),
        (torch.optim.AdamW, {"foreach": True}, 64),
        (torch.optim.SGD, {"foreach": True, "lr": 0.1, "momentum": 0.9}, 0),
        (torch.optim.SGD, {"foreach": True, "lr": 0.1, "weight_decay": 0.1}, 64),
    ],
)
def test_temporary_tensors_of_a_foreach_step_are_those_of_the_largest_group(
    kind: Any, options: dict[str, Any], expected: int
) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(size))]} for size in (16, 8)]
    assert bytes_of_temporaries(kind(groups, **options)) == expected


def test_states_of_what_is_not_known_are_not_counted() -> None:
    class Foreign(torch.optim.Optimizer):
        def step(self, closure=None):
            raise AssertionError("it is asked for nothing")

    model = nn.Linear(2, 2)
    assert bytes_of_coming_states(Foreign(model.parameters(), {"lr": 1})) == 0
    assert bytes_of_coming_states(torch.optim.LBFGS(model.parameters())) == 0
