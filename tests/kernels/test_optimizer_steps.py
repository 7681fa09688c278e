"""Optimizers that are stepped in C are as near to fp64 as torch's, and are torch's where a step is unusual."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop

from nano_loop import accelerated
from nano_loop.kernels import optimizer_steps
from nano_loop.patching.patch_table import left_by_runs

pytestmark = pytest.mark.skipif(
    optimizer_steps.KERNEL.unavailable is not None, reason=str(optimizer_steps.KERNEL.unavailable)
)
KINDS = {
    "RMSprop": (RMSprop, {}),
    "RMSprop, decaying": (RMSprop, {"weight_decay": 0.1, "maximize": True}),
    "RMSprop with momentum": (RMSprop, {"momentum": 0.9, "alpha": 0.9}),
    "RMSprop, centered": (RMSprop, {"centered": True, "eps": 1e-3}),
    "RMSprop, centered with momentum": (RMSprop, {"centered": True, "momentum": 0.5, "eps": 1e-3}),
    "NAdam": (NAdam, {"weight_decay": 0.1}),
    "NAdam, decoupled": (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    "RAdam": (RAdam, {"betas": (0.8, 0.95)}),
    "RAdam, decoupled": (RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Adamax": (Adamax, {"weight_decay": 0.1}),
    "Adadelta": (Adadelta, {"lr": 0.5, "weight_decay": 0.01, "maximize": True}),
    "Rprop": (Rprop, {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.02)}),
}
OF_EACH_KIND = pytest.mark.parametrize("name", KINDS)
STEPS = 12


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(45, 7), nn.Linear(7, 3001)).to(dtype)
    model[0].to(memory_format=torch.channels_last)
    return model


def optimizer_of(name, parameters):
    kind, settings = KINDS[name]
    return kind(parameters, **{"lr": 0.01, **settings})


def train(model, optimizer, steps=STEPS, first=0):
    """Step with gradients that the numbers of the steps determine. One parameter has none at times."""
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        for at, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 10.0 ** (number % 3 - 1)
            parameter.grad = None if at == 2 and number % 4 == 1 else gradient.to(parameter).contiguous()
            if parameter.dim() == 4:
                parameter.grad = parameter.grad.to(memory_format=torch.channels_last)
        optimizer.step()


def values(model, optimizer):
    state = optimizer.state_dict()["state"].values()
    return [*model.parameters(), *(value for one in state for value in one.values())]


def error(results, exact):
    """The rms of what results differ by from those in fp64, relative to their size."""
    pairs = zip(results, exact, strict=True)
    return sum(((a.double() - b).square().sum() / (b.square().sum() + 1e-30)).item() for a, b in pairs) ** 0.5


def trained(name, is_plain=False, dtype=torch.float32):
    model = model_of(dtype)
    optimizer = optimizer_of(name, model.parameters())
    calls = optimizer_steps.KERNEL.calls
    if is_plain:
        train(model, optimizer)
    else:
        with accelerated(model, optimizer, verbose=False) as run:
            train(model, optimizer)
        assert type(optimizer).__name__ in run.report["fused_optimizer"].detail
        assert left_by_runs() == {}
    return values(model, optimizer), optimizer_steps.KERNEL.calls - calls


@OF_EACH_KIND
def test_steps_are_as_near_to_fp64_as_torchs(name):
    (results, calls), (plain, none) = trained(name), trained(name, is_plain=True)
    exact, _ = trained(name, is_plain=True, dtype=torch.float64)
    assert calls > STEPS
    assert none == 0
    assert error(results, exact) <= 1.5 * error(plain, exact) + 1e-7


@OF_EACH_KIND
def test_checkpoints_go_from_one_to_the_other(name):
    model = model_of()
    optimizer = optimizer_of(name, model.parameters())
    with accelerated(model, optimizer, verbose=False):
        train(model, optimizer, 4)
    twin = copy.deepcopy(model)
    other = optimizer_of(name, twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(twin, other, 4, first=4)
    with accelerated(model, optimizer, verbose=False):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, 4, first=4)
    for one, expected in zip(values(model, optimizer), values(twin, other), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)
    assert other.state_dict().keys() == optimizer.state_dict().keys()
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


UNUSUAL = {
    "foreach": lambda p: RMSprop(p, foreach=True),
    "not foreach": lambda p: RMSprop(p, foreach=False),
    "a tensor as lr": lambda p: Adamax(p, lr=torch.tensor(0.01)),
    "a subclass": lambda p: type("Own", (RMSprop,), {})(p),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_optimizers_are_torchs(make):
    model, twin = model_of(), model_of()
    optimizer, other = make(model.parameters()), make(twin.parameters())
    calls = optimizer_steps.KERNEL.calls
    with accelerated(model, optimizer, verbose=False):
        train(model, optimizer, 3)
    train(twin, other, 3)
    assert optimizer_steps.KERNEL.calls == calls
    assert all(map(torch.equal, values(model, optimizer), values(twin, other)))


def test_gradients_in_another_layout_sparse_and_in_fp64_are_torchs():
    for change in (
        lambda p: p.grad.contiguous() if p.dim() == 4 else p.grad,
        lambda p: p.grad.to_sparse() if p.dim() == 2 else p.grad,
    ):
        model = model_of()
        optimizer = NAdam(model.parameters())
        with accelerated(model, optimizer, verbose=False):
            train(model, optimizer, 1)
            for parameter in model.parameters():
                parameter.grad = change(parameter)
            calls = optimizer_steps.KERNEL.calls
            if any(parameter.grad.is_sparse for parameter in model.parameters()):
                with pytest.raises(RuntimeError, match="sparse"):
                    optimizer.step()
            else:
                optimizer.step()
            assert optimizer_steps.KERNEL.calls == calls


def test_parameter_whose_memory_was_released_is_left_to_torch():
    parameter = torch.ones(3)
    assert optimizer_steps.addresses_of([parameter, torch.ones(3)]) is not None
    parameter.untyped_storage().resize_(0)
    assert optimizer_steps.addresses_of([parameter, torch.ones(3)]) is None


def test_nans_stay():
    parameter = nn.Parameter(torch.ones(3))
    for kind in (RMSprop, NAdam, RAdam, Adamax, Adadelta):
        optimizer = kind([parameter])
        model = nn.ParameterList([parameter])
        with accelerated(model, optimizer, verbose=False), torch.no_grad():
            for number in range(3):
                parameter.grad = torch.tensor([1.0, float("nan") if number else 1.0, -1.0])
                optimizer.step()
        assert parameter.isnan().tolist() == [False, True, False], kind
        parameter = nn.Parameter(torch.ones(3))
