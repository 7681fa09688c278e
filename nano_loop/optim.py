"""Optimizers of BigDL-Nano: `SparseAdam`, for models with sparse and dense gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam

from nano_loop.patching.torch_private_optimizers import sparse_adam


class SparseAdam(torch.optim.SparseAdam):
    """Adam for models in which some parameters have sparse gradients, such as embeddings with ``sparse=True``.

    A parameter with a sparse gradient is updated as by `torch.optim.SparseAdam`: only in the rows that the gradient
    contains. A parameter with a dense gradient is updated as by `torch.optim.Adam`; torch's class raises an error.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters, or dicts of parameter groups.
    lr : float or torch.Tensor
        Learning rate.
    betas : tuple of two floats
        Coefficients of the running averages of the gradient and of its square.
    eps : float
        Added to the denominator.
    maximize : bool
        Whether to maximize the objective.

    Examples
    --------
    >>> import torch
    >>> from nano_loop.optim import SparseAdam
    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 1))
    >>> optimizer = SparseAdam(model.parameters(), lr=0.01)
    >>> model(torch.tensor([2, 5])).sum().backward()
    >>> optimizer.step()
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once.

        Parameters
        ----------
        closure : callable, optional
            Recomputes the loss and the gradients, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            numbers = {"eps": group["eps"], "maximize": group.get("maximize", False)}
            numbers["beta1"], numbers["beta2"] = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                # torch's Adam stores the step count as a tensor. Checkpoints of its SparseAdam have a plain number.
                count = state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)
                lists = [parameter], [parameter.grad], [state["exp_avg"]], [state["exp_avg_sq"]]
                if parameter.grad.is_sparse:
                    count += 1
                    sparse_adam(*lists, [count.item()], lr=float(group["lr"]), **numbers)
                else:
                    adam(*lists, [], [count], amsgrad=False, weight_decay=0, lr=group["lr"], **numbers)
        return loss
