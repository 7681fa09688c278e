"""Optimizers during a run: the closure of a step, and equal memory layouts of parameters, gradients and state.

torch's fused CPU optimizers walk parameter, gradient and state as flat memory and check nothing: where their strides
differ, each element is updated with another element's gradient, silently (pytorch#110758 is the CUDA side of it).
A checkpoint from an NCHW run that is loaded into a channels_last model is enough.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

# --- closures ---

Closure = Callable[[], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure that a step is given, None where there is none; `args` begin with the optimizer."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) else None


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `closure` in the place of the one that is there."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


# --- layouts ---

_guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def guard_layout(optimizer: Optimizer, undoing: ExitStack) -> None:
    """Hold the strides of gradients and state to those of the parameters, until `undoing` is closed.

    State is laid out anew now, after each ``load_state_dict``, and before a step that finds a parameter's layout
    changed; a gradient before each fused step. ``state_dict()`` gives state in torch's default layout, so that a
    checkpoint is safe in a plain run too.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its state is changed; guarding it twice changes nothing.
    undoing : contextlib.ExitStack
        Takes the hooks away when it is closed.
    """
    if optimizer in _guarded:
        return
    _guarded.add(optimizer)
    undoing.callback(_guarded.discard, optimizer)
    guard = _Guard()
    relay_state(optimizer)
    for handle in (
        optimizer.register_step_pre_hook(guard.before_step),
        optimizer.register_load_state_dict_post_hook(relay_state),
        optimizer.register_state_dict_post_hook(portable_state),
    ):
        undoing.callback(handle.remove)


class _Guard:
    """The hook before each step of one optimizer."""

    def __init__(self) -> None:
        self._strides: dict[int, tuple[int, ...]] = {}  # at the last step, of the parameters that are not contiguous

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        moved = False
        for group in optimizer.param_groups:
            if group.get("fused"):
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is None or gradient.layout is not torch.strided:
                        continue
                    # Nearly always both are contiguous, and were so before: this line is what a step costs.
                    if parameter.is_contiguous() and gradient.is_contiguous() and id(parameter) not in self._strides:
                        continue
                    moved |= self._match(parameter, gradient)
        if moved:
            relay_state(optimizer)

    def _match(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Lay the gradient out as its parameter, and say whether the parameter has moved since the last step."""
        stride = parameter.stride()
        if gradient.stride() != stride:
            parameter.grad = laid_out_as(parameter, gradient)
        before = self._strides.get(id(parameter))
        self._strides[id(parameter)] = stride
        return before != stride


def relay_state(optimizer: Optimizer) -> None:
    """Give every tensor of the optimizer's state that has its parameter's shape its parameter's strides too."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if _is_misplaced(value, parameter):
                state[key] = laid_out_as(parameter, value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlap, so that another may take over its strides."""
    return tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def laid_out_as(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy `value` into new memory with the strides of `like`; shape and dtype are those of `value`.

    Where `like` is not dense, its strides are only approached.
    """
    return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)


def portable_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with every dense tensor of its state contiguous; neither argument is changed."""
    state = {key: _contiguous(values) for key, values in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _contiguous(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        key: value.contiguous() if isinstance(value, torch.Tensor) and value.layout is torch.strided else value
        for key, value in values.items()
    }


def _is_misplaced(value: Any, parameter: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided is parameter.layout
        and value.shape == parameter.shape
        and value.stride() != parameter.stride()
    )
