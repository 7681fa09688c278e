"""Adam and SGD of Keras and of fastai, which are no optimizers of torch, by torch's fused kernels.

Their own steps read and write each parameter about eight times, fastai's in Python for each. The kernels compute the
same within rounding, with the libraries' state: it is theirs in checkpoints, and where a kernel does not apply, their
own step goes on with it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from nano_loop.optimizers.covered_parameters import are_covered, covered
from nano_loop.patching.attributes import replaced
from nano_loop.patching.torch_private import foreach_multiply
from nano_loop.patching.torch_private_libraries import (
    KERAS_ADAM,
    KERAS_SGD,
    KERAS_STEP,
    keras_momenta,
    keras_moments,
)
from nano_loop.patching.torch_private_optimizers import fused_adam, fused_sgd

_Method = Callable[..., Any]


class _Step(NamedTuple):
    """A method that updates parameters: its library, its class by module and name, and what makes its replacement."""

    library: str
    module: str
    kind: str
    method: str
    make: Callable[[_Method], _Method]


def libraries_imported() -> list[str]:
    """Return the names of the libraries whose optimizers may train something."""
    return [*dict.fromkeys(step.library for step in _STEPS if step.module in sys.modules)]


@contextmanager
def library_steps_fused(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Call fused kernels in the steps of optimizers of these libraries that train such parameters.

    Libraries that are imported later are not concerned. The parameters are held weakly.
    """
    with ExitStack() as changes:
        for step in _STEPS:
            if step.module in sys.modules:
                kind = getattr(sys.modules[step.module], step.kind)
                changes.enter_context(replaced(kind, step.method, step.make))
        changes.enter_context(covered(parameters))
        del parameters
        yield


def _are_alike(*lists: Sequence[Tensor]) -> bool:
    """Whether all tensors are contiguous ones on the CPU, of one dtype that is real: the kernels check nothing."""
    dtype = lists[0][0].dtype
    return dtype.is_floating_point and all(
        tensor.dtype is dtype and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
        for tensors in lists
        for tensor in tensors
    )


# --- Keras ---


def _keras_adam(original: _Method) -> _Method:
    @functools.wraps(original)
    def step(self: Any, grads: Any, variables: Any, learning_rate: Any) -> Any:
        parameters = [variable.value for variable in variables]
        if self.amsgrad or not are_covered(parameters):
            return original(self, grads, variables, learning_rate)
        means, squares = keras_moments(self, variables)
        if not _are_alike(parameters, grads, means, squares):
            return original(self, grads, variables, learning_rate)
        count = int(_number(self.iterations)) + 1
        # Keras adds epsilon to the root before it corrects that for its beginning at 0, and torch afterwards.
        epsilon = self.epsilon / math.sqrt(1 - self.beta_2**count)
        betas = {"beta1": self.beta_1, "beta2": self.beta_2}
        _adam(parameters, grads, means, squares, [count] * len(means), lr=_number(learning_rate), eps=epsilon, **betas)
        return None

    return step


def _keras_sgd(original: _Method) -> _Method:
    @functools.wraps(original)
    def step(self: Any, grads: Any, variables: Any, learning_rate: Any) -> Any:
        parameters = [variable.value for variable in variables]
        if not self.momentum or self.nesterov or not are_covered(parameters):
            return original(self, grads, variables, learning_rate)
        momenta = keras_momenta(self, variables)
        if not _are_alike(parameters, grads, momenta):
            return original(self, grads, variables, learning_rate)
        # Keras' momenta have the rate, and are added: a part of -rate of the gradient, and a step of -1 times them.
        _sgd(parameters, grads, momenta, momentum=self.momentum, lr=-1.0, dampening=1.0 + _number(learning_rate))
        return None

    return step


def _number(value: Any) -> float:
    """Return the number in a variable of Keras, in a tensor, or itself."""
    return float(getattr(value, "value", value))


# --- fastai ---


def _fastai(original: _Method) -> _Method:
    @functools.wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        names = _names_of_callbacks(self.cbs)
        update = _FASTAI.get(names) if closure is None else None
        groups = [*zip(self.param_lists, self.hypers, strict=False)]
        stepped = [[parameter for parameter in group if parameter.grad is not None] for group, _ in groups]
        if update is None or not are_covered([parameter for group in stepped for parameter in group]):
            return original(self, closure)
        states = self.state
        keys = _STATE[update]
        for parameters in stepped:
            missing = [parameter for parameter in parameters if any(key not in states[parameter] for key in keys)]
            for parameter in missing:
                states[parameter] = {**{key: torch.zeros_like(parameter.grad) for key in keys}, **states[parameter]}
        kept = [[states[parameter][key] for key in keys for parameter in parameters] for parameters in stepped]
        plain = [[value.data for parameter in group for value in (parameter, parameter.grad)] for group in stepped]
        if any(group and not _are_alike(group, values) for group, values in zip(plain, kept, strict=True)):
            return original(self, closure)
        for parameters, (_, hyper) in zip(stepped, groups, strict=True):
            for decays in (True, False):  # norms and biases may have no decay
                chosen = [one for one in parameters if bool(states[one].get("do_wd", True)) is decays]
                if chosen:
                    update(chosen, [states[one] for one in chosen], hyper, hyper["wd"] if decays else 0.0)
        return None

    return step


def _names_of_callbacks(callbacks: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of fastai's own functions that an optimizer consists of; others have none."""
    own = vars(sys.modules["fastai.optimizer"])
    names = []
    for callback in callbacks:
        function, words = callback, ""
        if isinstance(callback, functools.partial) and not callback.args:
            function, words = callback.func, "".join(f", {key}={value}" for key, value in callback.keywords.items())
        name = getattr(function, "__name__", "")
        names.append(f"{name}{words}" if own.get(name) is function else "")
    return tuple(names)


def _fastai_adam(parameters: list[Any], states: list[dict[str, Any]], hyper: dict[str, Any], decay: float) -> None:
    for state in states:
        state["step"] = state.get("step", 0) + 1
    _adam(
        [parameter.data for parameter in parameters],
        [parameter.grad.data for parameter in parameters],
        [state["grad_avg"] for state in states],
        [state["sqr_avg"] for state in states],
        [state["step"] for state in states],
        lr=hyper["lr"],
        beta1=hyper["mom"],
        beta2=hyper["sqr_mom"],
        eps=hyper["eps"],
        weight_decay=decay,
    )


def _fastai_sgd(parameters: list[Any], states: list[dict[str, Any]], hyper: dict[str, Any], decay: float) -> None:
    weights = [parameter.data for parameter in parameters]
    if decay:
        foreach_multiply(weights, 1 - hyper["lr"] * decay)
    gradients = [parameter.grad.data for parameter in parameters]
    _sgd(weights, gradients, [state["grad_avg"] for state in states], lr=hyper["lr"], momentum=hyper["mom"])


#: What fastai's optimizers consist of that have a kernel.
_FASTAI = {
    ("weight_decay", "average_grad, dampening=True", "average_sqr_grad", "step_stat", "adam_step"): _fastai_adam,
    ("weight_decay", "average_grad", "momentum_step"): _fastai_sgd,
}
#: What they keep of a parameter that begins at 0.
_STATE: dict[Any, tuple[str, ...]] = {_fastai_adam: ("grad_avg", "sqr_avg"), _fastai_sgd: ("grad_avg",)}


# --- the kernels ---


def _adam(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    counts: list[int],
    *,
    weight_decay: float = 0.0,
    **numbers: float,
) -> None:
    steps = {count: torch.tensor(float(count), dtype=torch.float32) for count in {*counts}}
    increment_version([*parameters, *means, *squares])
    with torch.no_grad():
        fused_adam(
            parameters,
            [*gradients],
            means,
            squares,
            [steps[count] for count in counts],
            is_decoupled=True,
            weight_decay=weight_decay,
            maximize=False,
            **numbers,
        )


def _sgd(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    *,
    dampening: float = 0.0,
    **numbers: float,
) -> None:
    increment_version([*parameters, *momenta])
    with torch.no_grad():
        fused_sgd(
            parameters,
            [*gradients],
            momenta,
            weight_decay=0.0,
            dampening=dampening,
            nesterov=False,
            maximize=False,
            **numbers,
        )


_STEPS = (
    _Step("Keras", *KERAS_ADAM, KERAS_STEP, _keras_adam),
    _Step("Keras", *KERAS_SGD, KERAS_STEP, _keras_sgd),
    _Step("fastai", "fastai.optimizer", "Optimizer", "step", _fastai),
)
