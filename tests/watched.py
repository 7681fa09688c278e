"""A model that records how it is run, and a loop, for tests of whether it is accelerated."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from nano_loop.optimizers.torch_fused_steps import is_fused  # noqa: F401


class Net(nn.Module):
    """Records the dtype in which its linear layer computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen = []

    def forward(self, x):
        out = self.layer(x)
        self.seen.append(out.dtype)
        return out


def loader():
    return DataLoader(TensorDataset(torch.randn(8, 3), torch.arange(8) % 2), batch_size=4)


def make(model=Net, optimizer=torch.optim.AdamW):
    net = model()
    return net, optimizer(net.parameters(), lr=0.1), loader()


def fit(model, optimizer, loader=(), loss=nn.functional.cross_entropy):
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


def in_bf16(*models):
    """Whether each model now computes in bf16."""
    return [net(torch.ones(1, 3)).dtype is torch.float32 and net.seen[-1] is torch.bfloat16 for net in models]


class FusedCalls(TorchDispatchMode):
    """Records the fused kernels called inside it, in ``names``."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_fused_" in func.__name__:
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
