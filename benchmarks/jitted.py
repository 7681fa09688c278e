"""JAX's jitted step for some workloads of the users' suite: the speed without dispatch of single operators.

Parameters, losses and optimizers are those of the workload, and the rows are in memory. Running statistics of batch
norms are omitted. It needs ``.venv-jax`` (``make ready-jax``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.loop import timed
from benchmarks.workloads import Workload

#: JAX's arrays by the names of torch's parameters.
Arrays = Mapping[str, Any]
#: The largest allowed relative difference between both losses, without dropout.
_TOLERANCE = 1e-4


def jax(work: Workload, count: int) -> list[float]:
    """JAX, with the step as one function.

    Raises
    ------
    LookupError
        The workload's loss is not written in JAX.
    RuntimeError
        Its loss in JAX differs from the model's.
    """
    if work.jax not in LOSSES:
        raise LookupError("its loss is not written in JAX")
    from jax import grad, jit, numpy, random, tree

    loss, (initial, update) = LOSSES[work.jax], OPTIMIZERS[type(work.optimizer)](work.optimizer.param_groups[0])
    loader: Any = work.batches
    rows = tuple(numpy.asarray(tensor.numpy()) for tensor in loader.dataset.tensors)

    @jit
    def computed(parameters: Arrays, state: Any, key: Any, places: Any) -> tuple[Arrays, Any, Any]:
        key, own = random.split(key)
        gradients = grad(loss)(parameters, tuple(column[places] for column in rows), own)
        parameters, state = update(parameters, gradients, state)
        return parameters, state, key

    for module in work.model.modules():
        module.train(module.training and not isinstance(module, torch.nn.Dropout))
    batch = next(iter(loader))
    parameters = {name: numpy.asarray(value.detach().numpy()) for name, value in work.model.named_parameters()}
    expected = work.loss(work.model, batch).item()
    own = loss(parameters, tuple(numpy.asarray(column.numpy()) for column in batch), None).item()
    if abs(own - expected) > _TOLERANCE * abs(expected):
        raise RuntimeError(f"the loss in JAX is {own:g}, and that of the model {expected:g}")
    now = parameters, initial(parameters), random.key(0)

    def step(places: Any) -> None:
        nonlocal now
        now = computed(*now, places)
        tree.map(lambda array: array.block_until_ready(), now[0])

    return timed(step, _Places(len(rows[0]), loader.batch_size), count)


class _Places:
    """The indices of the rows of each batch, in a new order in each epoch."""

    def __init__(self, rows: int, batch: int) -> None:
        self._rows, self._batch = rows, batch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self._rows).numpy()
        for begin in range(0, self._rows, self._batch):
            yield order[begin : begin + self._batch]


# --- optimizers ---


def _adam(group: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from jax import numpy, tree

    rate, (first, second), eps = group["lr"], group["betas"], group["eps"]

    def initial(parameters: Arrays) -> Any:
        zeros = tree.map(numpy.zeros_like, parameters)
        return numpy.zeros(()), zeros, zeros

    def update(parameters: Arrays, gradients: Arrays, state: Any) -> tuple[Arrays, Any]:
        number, means, squares = state
        number = number + 1
        means = tree.map(lambda m, g: first * m + (1 - first) * g, means, gradients)
        squares = tree.map(lambda v, g: second * v + (1 - second) * g * g, squares, gradients)
        size, scale = rate / (1 - first**number), numpy.sqrt(1 - second**number)
        updated = tree.map(lambda p, m, v: p - size * m / (numpy.sqrt(v) / scale + eps), parameters, means, squares)
        return updated, (number, means, squares)

    return initial, update


def _rmsprop(group: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from jax import numpy, tree

    rate, alpha, eps = group["lr"], group["alpha"], group["eps"]

    def update(parameters: Arrays, gradients: Arrays, squares: Any) -> tuple[Arrays, Any]:
        squares = tree.map(lambda v, g: alpha * v + (1 - alpha) * g * g, squares, gradients)
        return tree.map(lambda p, g, v: p - rate * g / (numpy.sqrt(v) + eps), parameters, gradients, squares), squares

    return lambda parameters: tree.map(numpy.zeros_like, parameters), update


#: By class, a function of a parameter group that returns the first state, and the update.
OPTIMIZERS = {torch.optim.Adam: _adam, torch.optim.RMSprop: _rmsprop}

# --- losses ---


def _linear(parameters: Arrays, name: str, x: Any) -> Any:
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]


def _cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the loss of each row."""
    from jax import nn, numpy

    return -numpy.take_along_axis(nn.log_softmax(logits), labels[:, None], 1)[:, 0]


def _tabular(parameters: Arrays, batch: Any, key: Any) -> Any:
    from jax import nn, numpy

    x, labels = batch
    x = (x - x.mean(0)) / numpy.sqrt(x.var(0) + 1e-5)
    x = x * parameters["normalization.weight"] + parameters["normalization.bias"]
    for at in (0, 2, 4):
        x = nn.relu(_linear(parameters, f"backbone.{at}", x))
    return _cross_entropy(_linear(parameters, "head", x), labels).mean()


def _policy(parameters: Arrays, batch: Any, key: Any) -> Any:
    from jax import numpy

    observations, actions, before, advantages, returns = batch

    def tower(name: str) -> Any:
        x = numpy.tanh(_linear(parameters, f"{name}.0", observations))
        return numpy.tanh(_linear(parameters, f"{name}.2", x))

    logits, values = _linear(parameters, "action", tower("policy")), _linear(parameters, "score", tower("value"))
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    ratio = numpy.exp(-_cross_entropy(logits, actions) - before)
    gain = numpy.minimum(advantages * ratio, advantages * numpy.clip(ratio, 0.8, 1.2)).mean()
    return 0.5 * ((values[:, 0] - returns) ** 2).mean() - gain


def _gru_forecast(parameters: Arrays, batch: Any, key: Any) -> Any:
    from jax import lax, nn, numpy

    past, future = batch
    x = past.transpose(1, 0, 2)
    for layer in range(2):
        own = {
            name: parameters[f"encoder.{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }

        def cell(state: Any, gates: Any, own: Arrays = own) -> tuple[Any, Any]:
            r, z, n = numpy.split(gates, 3, 1)
            of_r, of_z, of_n = numpy.split(state @ own["weight_hh"].T + own["bias_hh"], 3, 1)
            new, kept = numpy.tanh(n + nn.sigmoid(r + of_r) * of_n), nn.sigmoid(z + of_z)
            state = new + kept * (state - new)
            return state, state

        _, x = lax.scan(cell, numpy.zeros((x.shape[1], 200)), x @ own["weight_ih"].T + own["bias_ih"])
    x = x[-future.shape[1] :].transpose(1, 0, 2)
    return abs(_linear(parameters, "decoder.2", nn.relu(_linear(parameters, "decoder.0", x))) - future).mean()


def _wide(parameters: Arrays, batch: Any, key: Any) -> Any:
    from jax import nn, numpy, random

    x, labels = batch
    keys = (None, None) if key is None else random.split(key)
    for at, own in zip((0, 3), keys, strict=True):
        x = nn.relu(_linear(parameters, f"{at}", x))
        x = x if own is None else numpy.where(random.bernoulli(own, 0.8, x.shape), x / 0.8, 0.0)
    return _cross_entropy(_linear(parameters, "6", x), labels).mean()


#: By the name in `Workload.jax`. Each accepts the parameters, a batch and a key, and returns the loss.
LOSSES: dict[str, Callable[..., Any]] = {
    "tabular": _tabular,
    "policy": _policy,
    "gru_forecast": _gru_forecast,
    "wide": _wide,
}
