"""The small models, data and optimizers that the loops train on."""

import functools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .pairs import named, untouched


class Net(nn.Module):
    """A classifier of 6 features into 3 classes, with a scalar parameter, dropout and batch norm."""

    def __init__(self):
        super().__init__()
        first = nn.Linear(6, 16, bias=False)  # batch norm removes a bias, so its gradient would only be noise
        self.encoder = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.head(self.encoder(x)) * self.scale


class ConvNet(nn.Module):
    """A classifier of 3×8×8 images; its 1×1 convolution has strides that fit both layouts."""

    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 1)
        self.features = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.MaxPool2d(2))
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Normed(nn.Module):
    """A classifier of 6 features with layer norm and group norm."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.layer_norm, self.group_norm = nn.LayerNorm(16), nn.GroupNorm(4, 16)

    def forward(self, x):
        x = torch.tanh(self.layer_norm(self.first(x)))
        return self.head(torch.tanh(self.group_norm(self.second(x))) - x.mean(dim=None))


class Lion(torch.optim.Optimizer):
    """A user-defined optimizer written from scratch."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(torch.sign(0.9 * average + 0.1 * p.grad), alpha=group["lr"])
                average.lerp_(p.grad, 0.01)


def vectors(size=36, batch_size=8, shuffle=True, **options):
    """Return a loader of 36 vectors: four batches of 8 and one of 4."""
    x = torch.randn(size, 6)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size, shuffle=shuffle, **options)


def images(size=18, batch_size=6):
    x = torch.randn(size, 3, 8, 8)
    return DataLoader(TensorDataset(x, x.mean((2, 3)).argmax(1)), batch_size, shuffle=True)


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


def job(name="", model=Net, optimizer=SGD, loader=vectors, **more):
    """
    Return a build for `pair`: a model, its optimizer, a loader, and `more`.

    Callables in `more` are called with the optimizer (for example, a scheduler's factory).
    """

    def build():
        net = model()
        arguments = {"model": net, "optimizer": optimizer(net.parameters()), "loader": loader()}
        return arguments | {k: v(arguments["optimizer"]) if callable(v) else v for k, v in more.items()}

    return named(name, build, model)


def steps(loader, *optimizers):
    """Yield each batch; zero the gradients before it, and step the optimizers after it."""
    for batch in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield batch
        for optimizer in optimizers:
            optimizer.step()


def train(loss_of, loader, *optimizers):
    """Take a step per batch; return the loss of each step."""
    losses = []
    for batch in steps(loader, *optimizers):
        loss = loss_of(*batch)
        loss.backward()
        losses.append(loss.item())
    return losses


def entropy(call):
    """Return the loss of a classifier."""
    return lambda x, y: nn.functional.cross_entropy(call(x), y)


def fit(model, optimizer, loader, by_hand=untouched, epochs=2):
    """Run the simplest loop; return the loss of each step."""
    return [loss for _ in range(epochs) for loss in train(entropy(by_hand(model)), loader, optimizer)]
