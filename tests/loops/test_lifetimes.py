"""Objects that the loop drops during a run are freed immediately: models, optimizers, loaders, and their patches."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import accelerated
from nano_loop.patching.patch_table import left_by_runs

BY_OBJECT = {
    "interceptors of calls, by module",
    "optimizers whose steps are fused",
    "proxies of loaders, by loader",
    "convolutions in NHWC, by id",
    "wide weights, by optimizer",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.ReLU())
        self.head = nn.LSTM(8, 2)

    def forward(self, x):
        return self.head(self.layers(x))[0]


def trained(run, optimizer_class=torch.optim.Adam, **loading):
    """Train a new model in a run, and return weak references to everything used in training."""
    model = Net()
    optimizer = optimizer_class(model.parameters(), 1e-3)
    dataset = TensorDataset(torch.rand(24, 1, 4, 4), torch.rand(24, 2))
    loader = DataLoader(dataset, 8, **loading)
    run.setup(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    objects = model, model.head, model.head.weight_ih_l0, optimizer, optimizer.state[model.head.weight_ih_l0]["step"]
    return [weakref.ref(value) for value in (*objects, loader, dataset)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16", "channels_last": True},
        {"precision": "bf16-true"},
        pytest.param({"precision": "auto", "fast_fetch": True}, marks=pytest.mark.slow),
        pytest.param({"precision": 64}, marks=pytest.mark.slow),
        pytest.param({"precision": 16}, marks=pytest.mark.slow),
        {"verify": True, "channels_last": "auto"},
        {"log_casts": True, "step_time": True, "fp32_ops": ["softmax"], "precision": "bf16"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::nano_loop.NanoWarning")
def test_nothing_that_was_set_up_is_kept(options):
    with accelerated(verbose=False, **options) as run:
        for _ in range(3):
            assert [reference() for reference in trained(run)] == [None] * 7
            assert not BY_OBJECT & left_by_runs().keys()


def parametrized():
    """torch makes a class for this module, whose property holds the module."""
    return nn.Sequential(weight_norm(nn.Linear(4, 4)))


def of_a_class_in_a_function():
    """The method holds the weights in its closure."""
    layer = nn.Linear(4, 4)

    class Closing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return layer(x)

    return Closing()


def of_a_class_with_a_decorated_method():
    model = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        return model[0](x)

    model.__class__ = type("Wrapped", (nn.Sequential,), {"forward": functools.wraps(nn.Linear.forward)(forward)})
    return model


@pytest.mark.parametrize("build", [parametrized, of_a_class_in_a_function, of_a_class_with_a_decorated_method])
@pytest.mark.parametrize("precision", [32, "bf16"])
def test_classes_and_functions_that_hold_a_model_are_not_kept(build, precision):
    """Collecting garbage frees them in the plain loop, since a class is part of a cycle.

    With casts around calls, methods of the program's own classes are replaced, so these live until the run ends.
    """

    def trained_once(run):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.setup(model, optimizer)
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        return [weakref.ref(value) for value in (model, *model.parameters())]

    with accelerated(verbose=False, precision=precision) as run:
        references = trained_once(run)
        gc.collect()
        assert precision == "bf16" or not any(reference() is not None for reference in references)
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_a_loader_that_only_the_header_names_is_read_to_its_end():
    """Its workers keep running, also those that the copy would keep for the next epoch."""
    model, dataset = nn.Linear(1, 1), TensorDataset(torch.arange(6.0)[:, None])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    totals = []
    with accelerated(verbose=False) as run:
        for (x,) in run.setup(model, optimizer, DataLoader(dataset, 2, num_workers=1, persistent_workers=True))[2]:
            totals.append(x.sum().item())
    assert totals == [1, 5, 9]


def test_a_part_that_outlives_its_model_stays_accelerated():
    encoder, x = nn.Linear(64, 64), torch.rand(8, 64)
    plain = encoder(x)
    with accelerated(verbose=False, precision="bf16") as run:
        run.setup(nn.ModuleList([encoder, nn.Linear(64, 64)]))
        inside = encoder(x)
    assert not torch.equal(inside, plain)
    assert torch.equal(encoder(x), plain)


def test_a_later_object_at_the_same_address_is_not_taken_for_a_set_up_one():
    x, addresses = torch.rand(8, 64), set()

    def set_up_and_dropped(run):
        model = nn.Linear(64, 64)
        addresses.add(id(model))
        run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        model(x)

    with accelerated(verbose=False, precision="bf16") as run:
        for _ in range(50):
            set_up_and_dropped(run)
        later = [nn.Linear(64, 64)]
        while id(later[-1]) not in addresses and len(later) < 5000:  # until an address is reused
            later.append(nn.Linear(64, 64))
        inside = [model(x) for model in later]
    assert addresses & set(map(id, later))
    assert all(torch.equal(output, model(x)) for output, model in zip(inside, later, strict=True))
