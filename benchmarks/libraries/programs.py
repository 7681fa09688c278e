"""The table of programs, and the data that several of them share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


class Trained(NamedTuple):
    """The model that a program has trained, and its last loss."""

    models: Sequence[nn.Module]
    loss: float


Fit = Callable[[], Trained]


@dataclass(frozen=True)
class Program:
    """The ordinary use of a library.

    Parameters
    ----------
    prepare : callable
        Imports the library and creates the data, small for tests. It returns a function that trains. Its docstring is
        the name of the trained model.
    library : str
        The name of the package.
    models : tuple of str
        The modules that the library trains, with their classes and optimizers, as in the report.
    torch : str
        The version of torch in the environment that has the library.
    """

    prepare: Callable[[bool], Fit]
    library: str
    models: tuple[str, ...]
    torch: str

    @property
    def title(self) -> str:
        """What is trained."""
        return (self.prepare.__doc__ or "").rstrip(".")


#: By name.
PROGRAMS: dict[str, Program] = {}


def program(
    library: str, *models: str, torch: str = "2.13"
) -> Callable[[Callable[[bool], Fit]], Callable[[bool], Fit]]:
    """Add a function to the table. The arguments are those of `Program`."""

    def add(prepare: Callable[[bool], Fit]) -> Callable[[bool], Fit]:
        PROGRAMS[prepare.__name__] = Program(prepare, library, models, torch)
        return prepare

    return add


def columns(rows: int, width: int, classes: int) -> tuple[Any, Any]:
    """Return a table of numbers in fp32, and the class of each row."""
    from sklearn.datasets import make_classification

    x, y = make_classification(rows, width, n_informative=8, n_classes=classes, random_state=0)
    return x.astype("float32"), y.astype("int64")


def waves(length: int, seed: int = 0) -> Any:
    """Return a series with two seasons and noise, in fp32."""
    time = np.arange(length)
    noise = np.random.default_rng(seed).normal(size=length)
    return (np.sin(time / 6 + seed) + np.sin(time / 40) + 0.1 * noise).astype("float32")


def pictures(count: int, classes: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return noise in fp32 around an image of each class, and the classes."""
    random = np.random.default_rng(0)
    labels = random.integers(classes, size=count)
    means = random.normal(size=(classes, *shape))
    return (means[labels] + random.normal(size=(count, *shape))).astype("float32"), labels


def seed() -> None:
    """Reset the random state of a program."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
