"""verify: check that an accelerated model computes the same as the plain one, and find the layer that does not."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from nano_loop.errors import NanoConfigError, error_message
from nano_loop.precision.verification.verification import LossFunction, Verification, verified
from nano_loop.runtime.run import accelerated_copy
from nano_loop.runtime.settings import Settings


def verify(model: Any, loss_fn: LossFunction, batch: Any, **options: Any) -> Verification:
    """Compare loss, outputs and gradients of an accelerated model with the plain one, in fp32 and in fp64.

    Everything is computed on copies. The model, its buffers and hooks, and the states of random generators stay
    unchanged. Dropout modules are omitted, since masks differ between precisions.

    Parameters
    ----------
    model : torch.nn.Module
        The model, in the mode (train or eval) to compare.
    loss_fn : callable
        Takes a model and the batch, and returns the loss, a tensor of one element.
    batch : object
        The batch for `loss_fn`: tensors, also in tuples, lists and dicts.
    **options
        The options of `nano`, such as ``precision="bf16"``, for one process.

    Returns
    -------
    Verification
        ``.ok``, ``.fault``, ``.summary()``, ``print(...)`` for tables, ``.as_dict()`` for JSON.

    Raises
    ------
    NanoConfigError
        If an option is invalid, or the model cannot be copied.

    Examples
    --------
    >>> import torch, nano_loop
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    >>> batch = torch.randn(4, 8), torch.randn(4, 1)
    >>> found = nano_loop.verify(model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), batch)
    >>> found.ok
    True
    """
    if not isinstance(model, nn.Module):
        got = f"verify of a {type(model).__name__}"
        raise NanoConfigError(error_message(got, "it compares a torch.nn.Module", "Pass the model first"))
    settings = Settings.read(options)  # the copy is always accelerated in one process
    return verified(model, loss_fn, batch, settings.options.kind, partial(accelerated_copy, settings))


__all__ = ["Verification", "verify"]
