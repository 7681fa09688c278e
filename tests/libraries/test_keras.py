"""Keras on torch: models are set up, train as without nano_loop, and layers are recognized."""

import os

import pytest
import torch

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

from nano_loop import accelerated  # noqa: E402

X, Y = torch.randn(48, 3), torch.randn(48, 2)


def by_keras(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])
    model.compile(optimizer=optimizer(), loss="mse")
    model.fit(X.numpy(), Y.numpy(), batch_size=12, epochs=3, shuffle=False, verbose=0)
    return [variable.value.detach().clone() for variable in model.weights]


OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.01, 9)),
    "SGD": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keras_trains_the_same_by_its_own_optimizers(name):
    optimizer = OPTIMIZERS[name]
    expected = by_keras(optimizer)
    with accelerated(verbose=False) as run:
        weights = by_keras(optimizer)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    assert "Sequential, trained by an optimizer that is not a torch optimizer" in [
        result.detail for result in run.report.results if result.name == "model"
    ]
    with accelerated(verbose=False, exact=True):
        assert all(map(torch.equal, by_keras(optimizer), expected))


def test_layers_of_keras_are_known_by_the_functions_that_they_call():
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.Dropout(0.5), layers.Flatten()])
    with accelerated(model, precision="bf16", verbose=False) as run:
        model(torch.rand(2, 8, 8, 1))
    steps = {result.name: result.code for result in run.report.results}
    assert steps["fast_convolution"] != "no_convolution"
    assert steps["fast_norm"] == "no_norm"
