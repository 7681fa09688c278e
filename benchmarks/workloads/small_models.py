"""The networks of the users' suite: the published defaults of libraries that people train with on CPUs, written out.

The libraries themselves are not used: an environment with all of them would pin another torch version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def perceptron(widths: Sequence[int], activation: type[nn.Module], dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers with an activation, and a dropout if there is one, between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation(), *[nn.Dropout(dropout)] * bool(dropout)]
    return nn.Sequential(*layers[: -2 if dropout else -1])


class CategoryEmbedding(nn.Module):
    """pytorch_tabular's CategoryEmbeddingModel on numbers: a batch norm of the inputs, a backbone and a head."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.normalization = nn.BatchNorm1d(inputs)
        self.backbone = nn.Sequential(
            *(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(self.normalization(x)))


class ActorCritic(nn.Module):
    """stable-baselines3's MlpPolicy for discrete actions: two towers of 64 units with tanh, each with a head."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.value = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action = nn.Linear(64, actions)
        self.score = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the actions, and the values of the observations."""
        return self.action(self.policy(x)), self.score(self.value(x)).flatten()


class TwinCritic(nn.Module):
    """stable-baselines3's ContinuousCritic: two networks of two hidden layers with 256 units."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        widths = [observations + actions, 256, 256, 1]
        self.first, self.second = perceptron(widths, nn.ReLU), perceptron(widths, nn.ReLU)

    def forward(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.cat([observations, actions], dim=1)
        return self.first(pair), self.second(pair)


class RecurrentForecaster(nn.Module):
    """neuralforecast's GRU and LSTM: two recurrent layers of 200 units, and a decoder of the last outputs."""

    def __init__(self, kind: type[nn.RNNBase], horizon: int) -> None:
        super().__init__()
        self.horizon = horizon
        self.encoder = kind(1, 200, num_layers=2, batch_first=True)
        self.decoder = perceptron([200, 128, 1], nn.ReLU)

    def forward(self, series: Tensor) -> Tensor:
        return self.decoder(self.encoder(series)[0][:, -self.horizon :])


class CausalConvolution(nn.Module):
    """A causal convolution and a ReLU."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.padding = dilation
        self.convolution = nn.Conv1d(inputs, outputs, 2, padding=dilation, dilation=dilation)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.convolution(x)[:, :, : -self.padding])


class ConvolutionalForecaster(nn.Module):
    """neuralforecast's TCN: five dilated convolutions of 128 channels, a linear layer over time, and a decoder."""

    def __init__(self, length: int, horizon: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(CausalConvolution(128 if at else 1, 128, dilation) for at, dilation in enumerate((1, 2, 4, 8, 16)))
        )
        self.adapter = nn.Linear(length, horizon)
        self.decoder = perceptron([128, 128, 1], nn.ReLU)

    def forward(self, series: Tensor) -> Tensor:
        hidden = self.encoder(series.transpose(1, 2))
        return self.decoder(self.adapter(hidden).transpose(1, 2))


class TransformerForecaster(nn.Module):
    """darts' TransformerModel, taught by the true values before each step: three layers on each side, 64 wide."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(1, 64)
        self.dropout = nn.Dropout(0.1)
        self.transformer = nn.Transformer(64, 4, 3, 3, dim_feedforward=512, dropout=0.1, batch_first=True)
        self.decoder = nn.Linear(64, 1)
        angles = torch.arange(longest).unsqueeze(1) * torch.exp(torch.arange(0, 64, 2) * (-math.log(10000.0) / 64))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], 2).view(longest, 64))

    def forward(self, past: Tensor, before: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(before.size(1))
        return self.decoder(self.transformer(self._embedded(past), self._embedded(before), tgt_mask=mask))

    def _embedded(self, series: Tensor) -> Tensor:
        return self.dropout(self.encoder(series) * 8 + self.positions[: series.size(1)])


class LinearBlock(nn.Module):
    """pyod's block: a linear layer, a batch norm, a ReLU and a dropout."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.normalization = nn.BatchNorm1d(outputs)
        self.activation = nn.ReLU()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.activation(self.normalization(self.linear(x))))


class AutoEncoder(nn.Module):
    """pyod's AutoEncoder, with hidden layers of 64 and 32 units on each side."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(LinearBlock(features, 64), LinearBlock(64, 32))
        self.decoder = nn.Sequential(LinearBlock(32, 64), nn.Linear(64, features))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class LeNet(nn.Module):
    """The network of PyTorch's tutorial "Training a classifier", after LeNet-5."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class GraphConvolution(nn.Module):
    """PyG's GCNConv, which normalizes the edges in each call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(x.size(0)).expand(2, -1)
        source, target = torch.cat([edges, loops], dim=1)
        degrees = x.new_zeros(x.size(0)).scatter_add_(0, target, x.new_ones(target.size(0)))
        scale = degrees.rsqrt()
        messages = self.linear(x).index_select(0, source) * (scale[source] * scale[target]).unsqueeze(1)
        places = target.unsqueeze(1).expand_as(messages)
        return messages.new_zeros(x.size(0), messages.size(1)).scatter_add_(0, places, messages) + self.bias


class GraphNetwork(nn.Module):
    """The GCN of PyG's example: two convolutions, 16 channels between them, dropout before both."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv1 = GraphConvolution(features, 16)
        self.conv2 = GraphConvolution(16, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edges).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edges)


class TextNetwork(nn.Module):
    """Kim's network for sentences: convolutions over 3, 4 and 5 words, the maximum of each, dropout."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 300)
        self.convolutions = nn.ModuleList(nn.Conv1d(300, 100, size) for size in (3, 4, 5))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(300, classes)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).transpose(1, 2)
        maxima = [F.relu(convolution(x)).max(dim=2).values for convolution in self.convolutions]
        return self.head(self.dropout(torch.cat(maxima, dim=1)))


class BasisBlock(nn.Module):
    """darts' block of N-BEATS: four hidden layers of 256 units, and two pairs of linear layers."""

    def __init__(self, length: int, horizon: int) -> None:
        super().__init__()
        self.activation = nn.ReLU()
        self.layers = nn.ModuleList(nn.Linear(256 if at else length, 256) for at in range(4))
        self.backcast_coefficients, self.forecast_coefficients = nn.Linear(256, 5), nn.Linear(256, 5)
        self.backcast, self.forecast = nn.Linear(5, length), nn.Linear(5, horizon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.backcast(self.backcast_coefficients(x)), self.forecast(self.forecast_coefficients(x))


class BasisForecaster(nn.Module):
    """darts' NBEATSModel in its generic architecture: 30 stacks of a block."""

    def __init__(self, length: int, horizon: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BasisBlock(length, horizon) for _ in range(30))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | None = None
        for block in self.blocks:
            backcast, forecast = block(x)
            x = x - backcast
            total = forecast if total is None else total + forecast
        assert total is not None
        return total


class GhostNorm(nn.Module):
    """TabNet's batch norm of virtual batches of 128 rows."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.normalization = nn.BatchNorm1d(features, momentum=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.normalization(chunk) for chunk in x.split(128)])


class GatedLayer(nn.Module):
    """TabNet's gated linear layer; the linear layer may be shared."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.normalization = GhostNorm(linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.normalization(self.linear(x)))


class FeatureTransformer(nn.Module):
    """TabNet's feature transformer: two gated layers with shared weights, and two with weights of its own."""

    def __init__(self, shared: Sequence[nn.Linear], width: int) -> None:
        super().__init__()
        own = [nn.Linear(width, 2 * width, bias=False) for _ in range(2)]
        self.layers = nn.ModuleList(GatedLayer(linear) for linear in (*shared, *own))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = (x + layer(x)) * math.sqrt(0.5)
        return x


class TabNet(nn.Module):
    """pytorch-tabnet's TabNet: three steps, 8 units for decisions and 8 for attention, sparsemax."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        shared = [nn.Linear(inputs, 32, bias=False), nn.Linear(16, 32, bias=False)]
        self.normalization = nn.BatchNorm1d(inputs, momentum=0.01)
        self.transformers = nn.ModuleList(FeatureTransformer(shared, 16) for _ in range(4))
        self.attention = nn.ModuleList(
            nn.Sequential(nn.Linear(8, inputs, bias=False), GhostNorm(inputs)) for _ in range(3)
        )
        self.head = nn.Linear(8, classes, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the mean entropy of the masks."""
        x = self.normalization(x)
        prior, total, entropy = torch.ones_like(x), x.new_zeros(()), x.new_zeros(())
        hidden = self.transformers[0](x)[:, 8:]
        for attention, transformer in zip(self.attention, self.transformers[1:], strict=True):
            mask = sparsemax(attention(hidden) * prior)
            entropy = entropy - (mask * (mask + 1e-15).log()).sum(1).mean()
            prior = prior * (1.3 - mask)
            out = transformer(mask * x)
            total = total + F.relu(out[:, :8])
            hidden = out[:, 8:]
        return self.head(total), entropy / 3


def sparsemax(x: Tensor) -> Tensor:
    """Return the nearest points of the simplex (Martins & Astudillo 2016)."""
    ordered = x.sort(dim=-1, descending=True).values
    sums = ordered.cumsum(-1)
    numbers = torch.arange(1, x.size(-1) + 1)
    support = (1 + numbers * ordered > sums).sum(-1, keepdim=True)
    return (x - (sums.gather(-1, support - 1) - 1) / support).clamp(min=0)


class Factorization(nn.Module):
    """RecBole's BPR: an embedding of 64 numbers for each user and each item."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 64), nn.Embedding(items, 64)

    def forward(self, users: Tensor, chosen: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of chosen items, and of others."""
        user = self.users(users)
        return (user * self.items(chosen)).sum(1), (user * self.items(others)).sum(1)
