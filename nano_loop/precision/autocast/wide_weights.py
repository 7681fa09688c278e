"""The fp32 copies of bf16 weights that the step of an optimizer sees, unless it is in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nano_loop.errors import NanoError
from nano_loop.optimizers.split import SplitWeights
from nano_loop.optimizers.split_steps import SplitSteps
from nano_loop.patching.objects.optimizers import closure_of, held_by, with_closure
from nano_loop.patching.torch_private import below_torch_functions
from nano_loop.precision.autocast.conversion import convert_data

_NEEDED = 'parameters and gradients have to be dense, in fp32 or by precision="bf16-true", and only lr may be a tensor'


class WideWeights:
    """The split weights of an optimizer that are fp32 during its step, unless that is in C.

    Parameters
    ----------
    weights : SplitWeights or None
        The run's. None: no weights are split.
    steps : SplitSteps or None
        Those in C.
    error : callable or None
        Returns the error about a step that is not in C, for an optimizer and a reason. None: it is none.
    """

    def __init__(
        self,
        weights: SplitWeights | None,
        steps: SplitSteps | None,
        error: Callable[[Optimizer, str], NanoError] | None,
    ) -> None:
        self._weights, self._steps, self._error = weights, steps, error
        # With their data and gradients in bf16, and gradients in fp32. Views and other processes may share the data.
        self._parameters: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []

    def takes(self, optimizer: Optimizer) -> bool:
        """Whether the next step is in C."""
        takes = self._steps is not None and self._steps.takes(optimizer)
        if self._error is not None and not takes:
            raise self._error(optimizer, _NEEDED)
        return takes

    def hooks(self, optimizer: Optimizer) -> list[Any]:
        """Register hooks by which an optimizer saves and loads states of fp32, and return their handles."""
        handles = [
            # Loading casts state to the dtype of the parameters.
            optimizer.register_load_state_dict_pre_hook(lambda loaded, _: self.widen(loaded, all_of_them=True)),
            optimizer.register_load_state_dict_post_hook(lambda *_: self.narrow()),
        ]
        if self._steps is not None:
            of_torch = self._steps.as_torchs
            handles.append(
                optimizer.register_state_dict_post_hook(
                    lambda _, saved: {**saved, "state": {key: of_torch(state) for key, state in saved["state"].items()}}
                )
            )
        return handles

    def widen(self, optimizer: Optimizer, all_of_them: bool = False) -> None:
        """Cast the parameters that have gradients, and these, to fp32."""
        if self._weights is None:
            return
        narrow = {
            id(parameter): parameter
            for parameter in held_by(optimizer)
            if parameter.dtype is torch.bfloat16 and (all_of_them or parameter.grad is not None)
        }
        parameters = [*narrow.values()]
        with below_torch_functions():  # the step may be in a `disable_casts` of the user's
            before = [(parameter.data, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            convert_data(parameters, self._weights.wide)
            for parameter, (data, gradient) in zip(parameters, before, strict=True):
                in_fp32 = parameter.grad = None if gradient is None else gradient.to(torch.float32)
                self._parameters.append((parameter, data, gradient, in_fp32))

    def narrow(self) -> None:
        """Split them again."""
        if self._weights is None or not self._parameters:
            return
        with below_torch_functions():
            for parameter, data, gradient, in_fp32 in self._parameters:
                is_kept = parameter.grad is in_fp32
                parameter.grad = None
                self._weights.write(data, parameter.data)
                parameter.data = data
                parameter.grad = gradient if is_kept else None
        self._parameters.clear()

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast for a step that is not in C, but not for its closure."""

        def widen_unless_in_c() -> None:
            if not self.takes(optimizer):
                self.widen(optimizer)

        closure = closure_of(args, kwargs)
        if closure is None:
            widen_unless_in_c()
            return None

        def narrow_meanwhile() -> Any:
            self.narrow()
            loss = closure()
            widen_unless_in_c()
            return loss

        return with_closure(args, kwargs, narrow_meanwhile)
