"""Models with fastai's optimizers are set up, and train as without nano_loop, within rounding."""

import pytest
import torch
from torch import nn

fastai = pytest.importorskip("fastai.optimizer")

from nano_loop import accelerated  # noqa: E402

X, Y = torch.randn(48, 3), torch.randn(48, 2)


def by_fastai(optimizer, changes=lambda optimizer, number: None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    made = optimizer([*net.parameters()])
    made.state[net[0].bias]["do_wd"] = False
    for number in range(8):
        changes(made, number)
        nn.functional.mse_loss(net(X), Y).backward()
        made.step()
        made.zero_grad()
    return [*map(torch.Tensor.detach, net.parameters())], made.state_dict()["state"]


def one_cycle(optimizer, number):
    optimizer.set_hypers(lr=0.01 * (1 + number), mom=0.95 - 0.01 * number)


OPTIMIZERS = {
    "Adam": lambda parameters: fastai.Adam(parameters, 0.01, wd=0.1),
    "SGD": lambda parameters: fastai.SGD(parameters, 0.01, mom=0.9, wd=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fastai_trains_the_same_by_its_own_optimizers(name):
    expected, state = by_fastai(OPTIMIZERS[name], one_cycle)
    with accelerated(verbose=False) as run:
        weights, own_state = by_fastai(OPTIMIZERS[name], one_cycle)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own_state, state, rtol=1e-5, atol=1e-6)
    assert "Sequential, trained by an optimizer that is not a torch optimizer" in [
        result.detail for result in run.report.results if result.name == "model"
    ]
    with accelerated(verbose=False, exact=True):
        assert all(map(torch.equal, by_fastai(OPTIMIZERS[name], one_cycle)[0], expected))
