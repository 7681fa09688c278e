"""Steps in C of optimizers for which torch has no fused kernel: one pass over a parameter, its gradient and its states.

torch updates such parameters by four to ten operators, each of which reads and writes tensors of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Adadelta, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from nano_loop.kernels.embedding.row_gradient import row_gradient_of
from nano_loop.kernels.optimizer_steps import KERNEL, Numbers, addresses_of, in_memory
from nano_loop.patching.objects.gradients import gradient_of, state_of
from nano_loop.patching.torch_private_optimizers import foreach_increment

_RECTIFIED = 5  # RAdam's length of a mean from which on its variance is known

_Group = Mapping[str, Any]
_State = dict[str, Any]
_Numbers = dict[str, float]


class _Kind(NamedTuple):
    """A kind of optimizer.

    Attributes
    ----------
    states : callable
        Returns the names of the states in a group, in the order of the C function.
    step : callable
        Returns the function and its numbers, by a group and by what `scalars` has returned.
    scalars : callable
        Returns the states of a parameter that are numbers, with the number of the step first.
    """

    states: Callable[[_Group], tuple[str, ...]]
    step: Callable[..., tuple[str, _Numbers]]
    scalars: Callable[[_Group, _State], tuple[float, ...]] = lambda group, state: (state["step"].item(),)


def gathered(optimizer: Optimizer, group: dict[str, Any]) -> Callable[[], None] | None:
    """Return what steps a group, or None where torch has to do it, as in a first step."""
    kind = KINDS[type(optimizer)]
    if group["foreach"] is not None or group["differentiable"] or group["capturable"]:
        return None
    if any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ()))):
        return None
    names = kind.states(group)
    states: list[_State] = []
    calls: list[list[int]] = []
    changed: list[Tensor] = []
    for parameter in group["params"]:
        gradient = gradient_of(parameter)
        if gradient is None:
            continue
        state = state_of(optimizer).get(parameter)
        if not state or any(state.get(name) is None for name in names):
            return None
        tensors = (parameter, gradient, *map(state.__getitem__, names))
        addresses = addresses_of(tensors)
        if addresses is None:
            return None
        rows = row_gradient_of(parameter)
        if rows is not None:
            rows.confirm(gradient)
        states.append(state)
        calls.append(addresses)
        changed += (parameter, *tensors[2:])

    def kernel() -> None:
        if states:
            foreach_increment([state["step"] for state in states])
            for function, numbers, rows in _by_numbers(kind, group, states, calls):
                KERNEL(function, in_memory(rows), len(rows), numbers)
            increment_version(changed)

    return kernel


def _by_numbers(
    kind: _Kind, group: _Group, states: Sequence[_State], calls: Sequence[list[int]]
) -> Iterator[tuple[str, Numbers, list[list[int]]]]:
    """Yield functions, their numbers, and what is stepped by them: all parameters that have had as many steps."""
    together: dict[tuple[float, ...], list[list[int]]] = {}
    for state, addresses in zip(states, calls, strict=True):
        together.setdefault(kind.scalars(group, state), []).append(addresses)
    for scalars, rows in together.items():
        function, numbers = kind.step(group, *scalars)
        yield function, _completed(group, numbers), rows


def _completed(group: _Group, numbers: _Numbers) -> Numbers:
    decay, is_decoupled = group.get("weight_decay", 0), group.get("decoupled_weight_decay", False)
    values = {
        "sign": -1.0 if group["maximize"] else 1.0,
        "kept": 1 - group["lr"] * decay if is_decoupled else 1.0,
        "decay": 0.0 if is_decoupled else decay,
        "rate": group["lr"],
        "eps": group.get("eps", 0.0),
        **numbers,
    }
    return Numbers(**values)


def _moments(group: _Group) -> _Numbers:
    beta1, beta2 = group["betas"]
    return {"a": 1 - beta1, "b": beta2, "c": 1 - beta2}


def _rmsprop(group: _Group, number: float) -> tuple[str, _Numbers]:
    name = f"rmsprop{'_centered' * bool(group['centered'])}{'_momentum' * (group['momentum'] > 0)}"
    return name, {"a": 1 - group["alpha"], "b": group["alpha"], "c": 1 - group["alpha"], "d": group["momentum"]}


def _states_of_rmsprop(group: _Group) -> tuple[str, ...]:
    centered = ("grad_avg",) if group["centered"] else ()
    return ("square_avg", *centered, *(("momentum_buffer",) if group["momentum"] > 0 else ()))


def _nadam(group: _Group, number: float, product: float) -> tuple[str, _Numbers]:
    factor, following = (_factor(group, at) for at in (number, number + 1))
    rates = {"rate": (1 - factor) / (1 - product), "d": following / (1 - product * following)}
    scaled = {name: rate * group["lr"] for name, rate in rates.items()}
    return "nadam", {**_moments(group), **scaled, "e": 1 - group["betas"][1] ** number}


def _factor(group: _Group, number: float) -> float:
    """Return the part of the mean that NAdam's step of a number keeps."""
    return float(group["betas"][0] * (1 - 0.5 * 0.96 ** (number * group["momentum_decay"])))


def _scalars_of_nadam(group: _Group, state: _State) -> tuple[float, ...]:
    number = state["step"].item()
    state["mu_product"] *= _factor(group, number)
    return number, state["mu_product"].item()


def _radam(group: _Group, number: float) -> tuple[str, _Numbers]:
    beta1, beta2 = group["betas"]
    bias, rate = 1 - beta2**number, group["lr"] / (1 - beta1**number)
    most = 2 / (1 - beta2) - 1
    length = most - 2 * number * beta2**number / bias
    if length <= _RECTIFIED:
        return "radam_unrectified", {**_moments(group), "rate": rate}
    rectified = ((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) ** 0.5
    return "radam", {**_moments(group), "rate": rate * rectified * bias**0.5}


def _adamax(group: _Group, number: float) -> tuple[str, _Numbers]:
    return "adamax", {**_moments(group), "rate": group["lr"] / (1 - group["betas"][0] ** number)}


def _adadelta(group: _Group, number: float) -> tuple[str, _Numbers]:
    return "adadelta", {"b": group["rho"], "c": 1 - group["rho"]}


def _rprop(group: _Group, number: float) -> tuple[str, _Numbers]:
    return "rprop", dict(zip("abcd", (*group["etas"], *group["step_sizes"]), strict=True))


#: The kinds of optimizers. A subclass is stepped by its own class.
KINDS: dict[type[Optimizer], _Kind] = {
    RMSprop: _Kind(_states_of_rmsprop, _rmsprop),
    NAdam: _Kind(lambda group: ("exp_avg", "exp_avg_sq"), _nadam, _scalars_of_nadam),
    RAdam: _Kind(lambda group: ("exp_avg", "exp_avg_sq"), _radam),
    Adamax: _Kind(lambda group: ("exp_avg", "exp_inf"), _adamax),
    Adadelta: _Kind(lambda group: ("square_avg", "acc_delta"), _adadelta),
    Rprop: _Kind(lambda group: ("prev", "step_size"), _rprop),
}
