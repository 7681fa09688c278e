"""Keras on torch: its layers are recognized. `test_programs.py` trains a model with its optimizer."""

import os

import pytest
import torch

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

from nano_loop import accelerated  # noqa: E402


def test_layers_of_keras_are_known_by_the_functions_that_they_call():
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.Dropout(0.5), layers.Flatten()])
    with accelerated(model, precision="bf16", verbose=False) as run:
        model(torch.rand(2, 8, 8, 1))
    steps = {result.name: result.code for result in run.report.results}
    assert steps["fast_convolution"] != "no_convolution"
    assert steps["fast_norm"] == "no_norm"
