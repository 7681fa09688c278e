"""Optimizers of BigDL-Nano: `SparseAdam`, for models with sparse and dense gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from nano_loop.errors import NanoConfigError, error_message, shown


class SparseAdam(Optimizer):
    """Adam for parameters of which some have sparse gradients, such as embeddings with ``sparse=True``.

    A parameter with a sparse gradient is updated as by `torch.optim.SparseAdam`: only in the rows that the gradient
    has. A parameter with a dense gradient is updated as by `torch.optim.Adam`, where torch's class raises.

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

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        maximize: bool = False,
    ) -> None:
        _check(lr, betas, eps)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, also that of `torch.optim.SparseAdam`, which counts steps in plain numbers."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
        for values in self.state.values():
            if "step" in values and not isinstance(values["step"], Tensor):
                values["step"] = torch.tensor(float(values["step"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and the gradients again, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._step_dense(group, [parameter for parameter in with_gradient if not parameter.grad.is_sparse])
            for parameter in with_gradient:
                if parameter.grad.is_sparse:
                    _step_sparse(parameter, self._state_of(parameter), group)
        return loss

    def _step_dense(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            has_complex=any(map(torch.is_complex, parameters)),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=0,
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _step_sparse(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Update the elements of a parameter, and of its running averages, that its sparse gradient has."""
    state["step"] += 1
    gradient = parameter.grad.coalesce()  # type: ignore[union-attr]
    values = -gradient.values() if group["maximize"] else gradient.values()
    if not values.numel():
        return
    places = tuple(gradient.indices())  # unique, since it is coalesced
    beta1, beta2 = group["betas"]
    average = state["exp_avg"][places].lerp_(values, 1 - beta1)
    square = state["exp_avg_sq"][places].mul_(beta2).addcmul_(values, values, value=1 - beta2)
    state["exp_avg"][places], state["exp_avg_sq"][places] = average, square
    step = float(state["step"])
    rate = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    parameter[places] = parameter[places] - rate * average / square.sqrt_().add_(group["eps"])


def _check(lr: float | Tensor, betas: tuple[float, float], eps: float) -> None:
    """Raise a `NanoConfigError` that lists all invalid arguments."""
    wrong = []
    if not lr > 0:
        wrong.append(error_message(shown("lr", lr), "it must be positive", "Leave it out for 0.001"))
    if not eps > 0:
        wrong.append(error_message(shown("eps", eps), "it must be positive", "Leave it out for 1e-8"))
    if not all(0 <= beta < 1 for beta in betas):
        wrong.append(
            error_message(shown("betas", betas), "both must be from 0 to below 1", "Leave it out for (0.9, 0.999)")
        )
    if wrong:
        raise NanoConfigError("\n".join(wrong))
