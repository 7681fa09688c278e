"""The uses of private names of libraries with optimizers of their own; see `nano_loop.patching.torch_private`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: The modules and the classes of Keras whose method `KERAS_STEP` updates all variables on torch.
KERAS_ADAM = "keras.src.backend.torch.optimizers.torch_adam", "Adam"
KERAS_SGD = "keras.src.backend.torch.optimizers.torch_sgd", "SGD"
KERAS_STEP = "_parallel_update_step"


def keras_moments(optimizer: Any, variables: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the means and the mean squares of gradients that Keras' Adam has for variables."""
    places = [optimizer._get_variable_index(variable) for variable in variables]
    means, squares = optimizer._momentums, optimizer._velocities
    return [means[place].value for place in places], [squares[place].value for place in places]


def keras_momenta(optimizer: Any, variables: Sequence[Any]) -> list[torch.Tensor]:
    """Return the momenta that Keras' SGD has for variables: what it adds to them."""
    return [optimizer.momentums[optimizer._get_variable_index(variable)].value for variable in variables]
