"""Steps of SGD, Adam and AdamW in one pass in C, for split or fp32 weights, with moments in fp32 or bf16.

torch's own ``step()`` makes the lists of a group, runs hooks and closures, and reads the settings. Only the function
that it calls with the lists is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer

from nano_loop.kernels.build import CompiledKernel, for_report
from nano_loop.kernels.memory import DENSE, FLOATS, Pointer
from nano_loop.optimizers.direct_steps import LEAST_EPS
from nano_loop.optimizers.narrow_states import in_fp32
from nano_loop.optimizers.row_steps import sign
from nano_loop.optimizers.split import SplitWeights
from nano_loop.optimizers.torch_fused_steps import steps_as_torch
from nano_loop.patching.optimizers import is_dense, laid_out_as, lies_as
from nano_loop.patching.torch_private import below_torch_functions

_NUMBERS = FLOATS._replace(layout=DENSE)
_TENSORS = (_NUMBERS, Pointer((torch.int16,)), Pointer((torch.int32,)), _NUMBERS)
KERNEL = CompiledKernel("optimizers", {"adam_step": (*_TENSORS, *[_NUMBERS] * 3), "sgd_step": (*_TENSORS, _NUMBERS)})
_KINDS = (AdamW, Adam, SGD)


def why_not(optimizer: Optimizer) -> str | None:
    """Return why no step of an optimizer can be one pass in C, or None if some may be."""
    name = type(optimizer).__name__
    kind = next((kind for kind in _KINDS if isinstance(optimizer, kind)), None)
    if kind is None:
        return f"{name} is not SGD, Adam or AdamW"
    if type(optimizer).step is not kind.step or not steps_as_torch(kind):
        return f"{name} overrides step()"
    return None if KERNEL.unavailable is None else for_report(KERNEL.unavailable)


class SplitSteps:
    """The steps of one optimizer, over split `weights` if any, with `moments` in a dtype, rounded by a seed."""

    def __init__(self, weights: SplitWeights | None, moments: torch.dtype, seed: int) -> None:
        self.moments = moments
        self._weights, self._seed, self._calls = weights, seed, 0
        self._dtypes = (torch.float32,) if weights is None else (torch.float32, torch.bfloat16)

    def takes(self, optimizer: Optimizer) -> bool:
        """Whether the next step of an optimizer runs in C, with the current gradients."""
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return False
        return all(self._takes(group, group["params"]) for group in optimizer.param_groups)

    def _takes(self, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> bool:
        if torch.compiler.is_compiling() or group["differentiable"] or group.get("capturable"):
            return False
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            return False
        return all(is_lazy(parameter) or self._takes_tensor(parameter) for parameter in parameters)

    def _takes_tensor(self, parameter: Tensor) -> bool:
        if parameter.dtype not in self._dtypes or not _NUMBERS.accepts(parameter):
            return False
        gradient = parameter.grad
        if gradient is not None and (gradient.dtype is not parameter.dtype or gradient.shape != parameter.shape):
            return False
        if gradient is not None and not _NUMBERS.accepts(gradient):
            return False
        return parameter.is_contiguous() or is_dense(parameter)

    def prepare(self, optimizer: Optimizer, lists: Sequence[list[Any]]) -> None:
        """Convert states that torch has created, or that were loaded, to the dtype and the layout of a step."""
        parameters, _, *states = lists
        for tensors in states[:-1] if isinstance(optimizer, Adam) else states:  # without Adam's counters
            for place, (parameter, value) in enumerate(zip(parameters, tensors, strict=False)):
                if value is None or value.layout is not torch.strided or parameter.dtype not in self._dtypes:
                    continue  # momenta of sparse gradients are sparse
                if value.dtype is not self.moments or not lies_as(value, parameter):
                    with below_torch_functions():  # the step may be in a `disable_casts` of the user's
                        tensors[place] = laid_out_as(parameter, value.to(self.moments))
                    own = optimizer.state[parameter]
                    own.update({name: tensors[place] for name, other in own.items() if other is value})

    def step(
        self, original: Callable[..., Any], group: Mapping[str, Any], lists: Sequence[list[Any]], settings: Any
    ) -> Any:
        """Step a group, given torch's functional arguments, or call `original`, torch's function, to do it."""
        is_scaled = settings.get("grad_scale") is not None or settings.get("found_inf") is not None
        if is_scaled or not self._takes(group, lists[0]):
            return original(*lists, **settings)
        call = self._call_sgd if "momentum" in settings else self._call_adam
        with below_torch_functions():
            for place in range(len(lists[0])):
                call(place, lists, settings)
        return None

    def as_torchs(self, state: Any) -> Any:
        """Return states of parameters in fp32."""
        return state if self.moments is torch.float32 else in_fp32(state)

    def _call_adam(self, place: int, lists: Sequence[list[Any]], settings: Mapping[str, Any]) -> None:
        parameters, gradients, means, squares, largest, counters = lists
        beta1, beta2, rate, eps = settings["beta1"], settings["beta2"], float(settings["lr"]), settings["eps"]
        counters[place] += 1
        number = counters[place].item()
        states = [means[place], squares[place], largest[place] if largest else None]
        coupled, decay = settings["weight_decay"], 1.0
        if settings["decoupled_weight_decay"]:
            coupled, decay = 0.0, 1 - rate * coupled
        numbers = (1 - beta1, 1 - beta2, beta2, math.sqrt(1 - beta2**number), eps, -(rate / (1 - beta1**number)))
        flags = (int(eps >= LEAST_EPS),)
        self._call(
            "adam_step", parameters[place], gradients[place], states, flags, (coupled, sign(settings), decay, *numbers)
        )

    def _call_sgd(self, place: int, lists: Sequence[list[Any]], settings: Mapping[str, Any]) -> None:
        parameters, gradients, momenta = lists
        momentum, share = settings["momentum"], 1 - settings["dampening"]
        is_first = bool(momentum) and momenta[place] is None
        if is_first:
            momenta[place] = torch.empty_like(parameters[place], dtype=self.moments, requires_grad=False)
        state = momenta[place] if momentum else None
        flags = (1, int(is_first), int(settings["nesterov"]))
        numbers = (settings["weight_decay"], sign(settings), momentum, share, -float(settings["lr"]))
        self._call("sgd_step", parameters[place], gradients[place], [state], flags, numbers)

    def _call(
        self,
        function: str,
        parameter: Tensor,
        gradient: Tensor,
        states: list[Tensor | None],
        flags: tuple[int, ...],
        numbers: tuple[float, ...],
    ) -> None:
        self._calls += 1
        rest = None if self._weights is None or parameter.dtype is torch.float32 else self._weights.of(parameter)
        halves = (None, None) if rest is None else (rest.numbers, rest.checksums)
        gradient = gradient if lies_as(gradient, parameter) else laid_out_as(parameter, gradient)
        is_narrow = any(state is not None and state.dtype is torch.bfloat16 for state in states)
        key = _mixed(self._seed << 40 | self._calls)
        sizes = (parameter.numel(), int(is_narrow))
        KERNEL(function, parameter, *halves, gradient, *states, *sizes, key, *flags, *map(float, numbers))
        increment_version([parameter, *(state for state in states if state is not None)])


def _mixed(number: int) -> int:
    """Return 63 pseudo-random bits, by Steele's splitmix64."""
    number = number * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    number = (number ^ number >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return (number ^ number >> 31) >> 1
