"""Models that people train on CPUs: small models with the published defaults of the libraries in their docstrings.

Batches come from a `DataLoader` over a `TensorDataset` of random numbers. Forecasters see 36 steps and forecast 12.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import small_models as models
from benchmarks.workloads.workload import Loss, Workload

_LENGTH, _HORIZON = 36, 12


def tabular(small: bool) -> Workload:
    """pytorch_tabular's CategoryEmbeddingModel, layers 128-64-32, on 28 numbers; batches of 64, Adam."""
    model, rows = models.CategoryEmbedding(28, 2), _rows(64, small)
    tensors = torch.randn(rows, 28), torch.randint(2, (rows,))
    return _workload(model, Adam(model.parameters(), 1e-3), _classify, tensors, 64, small, epochs=40, jax="tabular")


def policy(small: bool) -> Workload:
    """stable-baselines3's PPO with MlpPolicy, 64 × 64, for 8 observations and 4 actions; batches of 64, Adam."""
    model, rows = models.ActorCritic(8, 4), _rows(64, small)
    tensors = torch.randn(rows, 8), torch.randint(4, (rows,)), torch.rand(rows).log(), *torch.randn(2, rows)
    optimizer = Adam(model.parameters(), 3e-4, eps=1e-5)
    return _workload(model, optimizer, _clipped_surrogate, tensors, 64, small, epochs=40, jax="policy")


def _clipped_surrogate(model: nn.Module, batch: Any) -> Tensor:
    """Return PPO's loss: of the policy, and half that of the values. The entropy's weight is 0 by default."""
    observations, actions, before, advantages, returns = batch
    logits, values = model(observations)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = torch.exp(-F.cross_entropy(logits, actions, reduction="none") - before)
    gain = torch.min(advantages * ratio, advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
    return 0.5 * F.mse_loss(values, returns) - gain


def critic(small: bool) -> Workload:
    """stable-baselines3's SAC, both critics, 256 × 256, for 17 observations and 6 actions; batches of 256, Adam."""
    model, rows = models.TwinCritic(17, 6), _rows(256, small)
    tensors = torch.randn(rows, 17), torch.rand(rows, 6) * 2 - 1, torch.randn(rows, 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        observations, actions, targets = batch
        return 0.5 * sum(F.mse_loss(values, targets) for values in model(observations, actions))

    return _workload(model, Adam(model.parameters(), 3e-4), loss, tensors, 256, small, epochs=20)


def gru_forecast(small: bool) -> Workload:
    """neuralforecast's GRU: 2 layers of 200 units and a decoder of 128; 128 windows, Adam, mean absolute error."""
    return _forecaster(models.RecurrentForecaster(nn.GRU, _HORIZON), small, batches=8, jax="gru_forecast")


def lstm_forecast(small: bool) -> Workload:
    """neuralforecast's LSTM: 2 layers of 200 units and a decoder of 128; 128 windows, Adam, mean absolute error."""
    work = _forecaster(models.RecurrentForecaster(nn.LSTM, _HORIZON), small, batches=8)
    gates = 4 * 200 * ((1 + 200) + (200 + 200))  # torch's counter does not know oneDNN's LSTM
    work.uncounted_flops = 3 * 2 * 128 * _LENGTH * gates
    return work


def tcn_forecast(small: bool) -> Workload:
    """neuralforecast's TCN: dilations 1 to 16, 128 channels; 128 windows, Adam, mean absolute error."""
    return _forecaster(models.ConvolutionalForecaster(_LENGTH, _HORIZON), small, batches=8)


def transformer_forecast(small: bool) -> Workload:
    """darts' TransformerModel: 3 + 3 layers, 64 wide, 4 heads, dropout 0.1; 32 windows, Adam, squared error."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        past, future = batch
        return F.mse_loss(model(past, torch.cat([past[:, -1:], future[:, :-1]], dim=1)), future)

    return _forecaster(models.TransformerForecaster(_LENGTH), small, batch=32, loss=loss)


def nbeats(small: bool) -> Workload:
    """darts' NBEATSModel: 30 stacks of 4 layers, 256 wide; 32 windows, Adam, squared error."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        past, future = batch
        return F.mse_loss(model(past.squeeze(2)), future.squeeze(2))

    return _forecaster(models.BasisForecaster(_LENGTH, _HORIZON), small, batch=32, loss=loss)


def _absolute(model: nn.Module, batch: Any) -> Tensor:
    return F.l1_loss(model(batch[0]), batch[1])


def _forecaster(
    model: nn.Module, small: bool, batch: int = 128, loss: Loss = _absolute, batches: int = 16, jax: str = ""
) -> Workload:
    rows = _rows(batch, small, batches)
    tensors = torch.randn(rows, _LENGTH, 1), torch.randn(rows, _HORIZON, 1)
    return _workload(model, Adam(model.parameters(), 1e-3), loss, tensors, batch, small, epochs=3, jax=jax)


def autoencoder(small: bool) -> Workload:
    """pyod's AutoEncoder of 32 numbers: 64-32-64, batch norms, dropout 0.2; batches of 32, Adam with weight decay."""
    model = models.AutoEncoder(32)
    optimizer = Adam(model.parameters(), 1e-3, weight_decay=1e-5)
    tensors = (torch.randn(_rows(32, small), 32),)
    return _workload(
        model, optimizer, lambda model, batch: F.mse_loss(model(batch[0]), batch[0]), tensors, 32, small, epochs=20
    )


def lenet(small: bool) -> Workload:
    """The LeNet of PyTorch's tutorial on CIFAR-10's shapes; batches of 4, SGD with momentum."""
    model, rows = models.LeNet(), _rows(4, small)
    tensors = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return _workload(model, optimizer, _classify, tensors, 4, small, epochs=20, images=True)


def gnn(small: bool) -> Workload:
    """The GCN of PyG's example on a graph as large as Cora, of which a step takes all; Adam."""
    nodes, edges, features, classes = 2708, 10556, 1433, 7
    model = models.GraphNetwork(features, classes)
    x = (torch.rand(nodes, features) < 0.0127).float()
    x = x / x.sum(1, keepdim=True).clamp(min=1)
    batch = x, torch.randint(nodes, (2, edges)), torch.randint(classes, (nodes,)), torch.arange(nodes) < 140
    groups = [
        {"params": [*model.conv1.parameters()], "weight_decay": 5e-4},
        {"params": [*model.conv2.parameters()], "weight_decay": 0.0},
    ]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, edges, labels, is_trained = batch
        return F.cross_entropy(model(x, edges)[is_trained], labels[is_trained])

    return Workload(model, Adam(groups, 0.01), [batch], loss, steps=4 if small else 60)


def text_cnn(small: bool) -> Workload:
    """Kim's network for sentences (2014) on 18,765 words, 56 words a sentence; batches of 50, Adadelta."""
    model, rows = models.TextNetwork(18_765, 2), _rows(50, small, 16)
    tensors = torch.randint(18_765, (rows, 56)), torch.randint(2, (rows,))
    return _workload(model, torch.optim.Adadelta(model.parameters()), _classify, tensors, 50, small, epochs=2)


def tabnet(small: bool) -> Workload:
    """pytorch-tabnet's TabNet on 54 numbers and 7 classes; batches of 1,024 in virtual ones of 128, Adam."""
    model, rows = models.TabNet(54, 7), _rows(1024, small, 8)
    tensors = torch.randn(rows, 54), torch.randint(7, (rows,))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits, entropy = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 1e-3 * entropy

    return _workload(model, Adam(model.parameters(), 0.02), loss, tensors, 1024, small, epochs=6)


def bpr(small: bool) -> Workload:
    """RecBole's BPR, 64 numbers for each of 100,000 users and as many items; batches of 2,048, Adam."""
    count = 1000 if small else 100_000
    model, rows = models.Factorization(count, count), _rows(2048, small, 8)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        chosen, others = model(*batch)
        return -torch.log(1e-10 + torch.sigmoid(chosen - others)).mean()

    tensors = torch.randint(count, (3, rows))
    return _workload(model, Adam(model.parameters(), 1e-3), loss, (*tensors,), 2048, small, epochs=3)


def wide(small: bool) -> Workload:
    """The perceptron of Keras' example mnist_mlp, 784-512-512-10 with dropout 0.2; batches of 128, RMSprop."""
    model, rows = models.perceptron([784, 512, 512, 10], nn.ReLU, dropout=0.2), _rows(128, small)
    tensors = torch.rand(rows, 784), torch.randint(10, (rows,))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9, eps=1e-7)
    return _workload(model, optimizer, _classify, tensors, 128, small, epochs=6, jax="wide")


def _classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _rows(batch: int, small: bool, batches: int = 32) -> int:
    return batch * (4 if small else batches)


def _workload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    tensors: tuple[Tensor, ...],
    batch: int,
    small: bool,
    epochs: int,
    images: bool = False,
    jax: str = "",
) -> Workload:
    """Return a workload whose batches come from a `DataLoader` over a `TensorDataset`."""
    loader = DataLoader(TensorDataset(*tensors), batch, shuffle=True)
    steps = (1 if small else epochs) * len(loader)
    return Workload(model, optimizer, loader, loss, images=images, steps=steps, jax=jax)
