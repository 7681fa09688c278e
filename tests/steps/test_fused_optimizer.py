"""Optimizers with fused CPU kernels use them; other optimizers and the user's settings stay unchanged."""

import pytest
import torch
from loops.wrappers import WRAPPERS
from torch import nn
from watched import FusedCalls

from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.fused_optimizer import FusedOptimizer


def parts(optimizer_of, model=None, **kwargs):
    model = model or nn.Linear(3, 2)
    return TrainingObjects([model], [optimizer_of(model.parameters(), lr=0.1, **kwargs)])


def flags(optimizer):
    return [(group["fused"], group["foreach"]) for group in optimizer.param_groups]


def kernels(optimizer):
    """Return the fused kernels that a step calls, for each group that uses one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    with FusedCalls() as calls:
        optimizer.step()
    return calls.names


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        *((kind, "no_kernel") for kind in (torch.optim.ASGD, torch.optim.LBFGS, torch.optim.RMSprop)),
        *((kind, "no_kernel") for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)),
        *((kind, "no_kernel") for kind in (torch.optim.Adadelta, torch.optim.Rprop)),
        (lambda p: torch.optim.Adam(p, foreach=True), "users_flag"),
        (lambda p: torch.optim.Adam(p, fused=False), "users_flag"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), "differentiable"),
        (lambda p: torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "unusual"),
        (OwnStep, "own_step"),
    ],
)
def test_what_cannot_or_shall_not_be_switched_is_skipped_with_the_reason(step, make, code):
    model = nn.Linear(3, 2)
    assert step(FusedOptimizer).skip_reason(TrainingObjects([model], [make(model.parameters())])).code == code


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_optimizer_inside_a_wrapper_is_switched(step, make):
    given = TrainingObjects(optimizers=[make(list(nn.Linear(3, 2).parameters()))])
    name = step(FusedOptimizer).apply(given)
    assert name in ("SGD", "AdamW")
    assert kernels(given.optimizers[0]) == [f"_fused_{name.lower()}_"]


def test_sparse_embeddings_are_a_reason(step):
    given = parts(torch.optim.SGD, nn.Embedding(4, 2, sparse=True))
    assert step(FusedOptimizer).skip_reason(given).code == "sparse"


def test_groups_are_switched_one_by_one(step):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "foreach": True}], lr=0.1)
    step(FusedOptimizer).apply(TrainingObjects([model], [optimizer]))
    assert kernels(optimizer) == ["_fused_sgd_"]
    assert flags(optimizer) == [(None, None), (None, True)]


def test_checkpoint_shows_the_users_flags_and_steps_are_fused_after_loading_one_unless_it_chooses(step):
    given = parts(torch.optim.Adam)
    (optimizer,) = given.optimizers
    made = step(FusedOptimizer)
    assert made.apply(given) == made.apply(given) == "Adam"  # it enables the fused step once
    assert made.skip_reason(given) is None
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["fused"] is None
    optimizer.load_state_dict(saved)
    assert kernels(optimizer) == ["_fused_adam_"]
    saved["param_groups"][0]["foreach"] = True
    optimizer.load_state_dict(saved)
    assert flags(optimizer) == [(None, True)]
    assert kernels(optimizer) == []
    optimizer.param_groups[0]["foreach"] = None
    assert kernels(optimizer) == ["_fused_adam_"]
    made.undo()
    assert kernels(optimizer) == []
