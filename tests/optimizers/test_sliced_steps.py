"""Large parameters of optimizers without a fused kernel are stepped in slices, with the same bits."""

import pytest
import torch
from torch import nn
from torch.optim import ASGD, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop

import nano_loop
from nano_loop.optimizers import sliced_steps
from nano_loop.optimizers.sliced_steps import large_parameters_sliced

SETTINGS = {
    "adadelta": (Adadelta, {"weight_decay": 0.1}),
    "adadelta, maximize": (Adadelta, {"maximize": True}),
    "rmsprop": (RMSprop, {}),
    "rmsprop, momentum": (RMSprop, {"centered": True, "momentum": 0.9}),
    "nadam": (NAdam, {}),
    "radam": (RAdam, {}),
    "adamax": (Adamax, {}),
    "asgd": (ASGD, {"t0": 2}),
    "rprop": (Rprop, {}),
    "the user's foreach": (RMSprop, {"foreach": True}),
}
IN_SLICES = [name for name in SETTINGS if name != "the user's foreach"]


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(sliced_steps, "ELEMENTS", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(kind, settings):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator) for size in ((30, 33), (5,), (16, 16), (3, 100))]
    weights[2] = weights[2].t()  # not contiguous
    weights[3] = weights[3].double()
    parameters = [nn.Parameter(weight) for weight in weights]
    return parameters, kind(parameters, **settings)


def trained(kind, settings):
    parameters, optimizer = made(kind, settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(7):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    states = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return [*parameters, *states], [parameter._version for parameter in parameters], optimizer


def counted(monkeypatch, kind):
    """Record the sizes of the parameters that torch's function steps."""
    sizes, name, module = [], kind.__name__.lower(), __import__(kind.__module__, fromlist=["_"])
    original = getattr(module, f"_single_tensor_{name}")

    def step(parameters, *args, **kwargs):
        sizes.extend(parameter.numel() for parameter in parameters)
        return original(parameters, *args, **kwargs)

    monkeypatch.setattr(module, f"_single_tensor_{name}", step)
    return sizes


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_in_slices_have_the_bits_of_torchs(small_slices, monkeypatch, name):
    kind, settings = SETTINGS[name]
    expected, _, optimizer = trained(kind, settings)
    sizes = counted(monkeypatch, kind)
    with large_parameters_sliced(optimizer):
        computed, versions, _ = trained(kind, settings)
    assert all(map(torch.equal, expected, computed))
    assert all(version > 0 for version in versions)
    assert (64 in sizes) == (name in IN_SLICES)
    sizes.clear()
    trained(kind, settings)
    assert 64 not in sizes  # torch's function is back


def test_run_reports_slices(small_slices, monkeypatch):
    sizes = counted(monkeypatch, RMSprop)

    @nano_loop.nano(verbose=False)
    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()

    model = nn.Linear(32, 32)
    train(model, RMSprop(model.parameters()))
    assert train.report["fused_optimizer"].status == "applied"
    assert train.report["fused_optimizer"].detail == "RMSprop in slices that fit in the cache"
    assert sizes.count(64) == 3 * 32 * 32 // 64
