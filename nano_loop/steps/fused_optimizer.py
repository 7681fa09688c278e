"""Switches optimizers to kernels that update a parameter in one pass: torch's fused ones, and those in C for others."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from nano_loop.kernels import optimizer_steps
from nano_loop.kernels.build import for_report
from nano_loop.optimizers import own_kernels
from nano_loop.optimizers.clipping import clipped_in_c
from nano_loop.optimizers.direct_steps import stepped_directly
from nano_loop.patching.lifetime import undone_with, weakly
from nano_loop.patching.objects.gradients import gradient_of, state_of
from nano_loop.patching.objects.optimizers import FusedStepCheck, guard_layout, is_dense
from nano_loop.patching.torch_private_optimizers import forget_fused_check, fused_check_pending
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SkipReason, Step

_HAVE_KERNELS = (AdamW, Adam, SGD, Adagrad)
_FLAGS = ("fused", "foreach")


class FusedOptimizer(Step):
    """Sets ``fused`` in the live optimizer's parameter groups, or has it stepped in C where torch has no such kernel.

    The layouts of gradients and state are guarded (see `nano_loop.patching.objects.optimizers`). ``state_dict()``
    returns the user's flags. After ``load_state_dict()``, which overwrites the flags, the step sets them again.
    Where they can, steps of the optimizer call the kernels directly (see `nano_loop.optimizers.direct_steps`). Those in
    C are in `nano_loop.optimizers.own_kernels`. Gradients are clipped in C, too (see `nano_loop.optimizers.clipping`).
    """

    name = "fused_optimizer"
    needs = "optimizers"

    @override
    def begin(self) -> None:
        self._switches: Any = WeakIdKeyDictionary()  # by the optimizer, which they do not hold

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        return SkipReason.of_all(self._refusals(parts))

    @override
    def apply(self, parts: TrainingObjects) -> str:
        fused, refused = [], []
        for optimizer, refusal in zip(parts.optimizers, self._refusals(parts), strict=True):
            if refusal:
                refused.append(refusal.detail)
                continue
            fused.append(type(optimizer).__name__)
            if optimizer not in self._switches:
                self._switches[optimizer] = _Switch(_sparse_parameters(parts.models))
                self._switch(optimizer, self._switches[optimizer])
        groups = [group["params"] for optimizer in parts.optimizers for group in optimizer.param_groups]
        self.undoing.enter_context(clipped_in_c(chain(parts.parameters(), *groups)))
        return "; ".join([", ".join(dict.fromkeys(fused)), *dict.fromkeys(refused)])

    def _refusals(self, parts: TrainingObjects) -> list[SkipReason | None]:
        sparse = _sparse_parameters(parts.models)
        return [None if optimizer in self._switches else _refusal(optimizer, sparse) for optimizer in parts.optimizers]

    def _switch(self, optimizer: Optimizer, switch: _Switch) -> None:
        if type(optimizer) not in own_kernels.KINDS:
            self._switch_flags(optimizer, switch)
        undone_with(optimizer, self.undoing).enter_context(stepped_directly(optimizer))

    def _switch_flags(self, optimizer: Optimizer, switch: _Switch) -> None:
        if fused_check_pending(optimizer):
            self.undoing.callback(weakly(forget_fused_check, optimizer))
        self.undoing.callback(weakly(switch.off, optimizer))
        guard_layout(optimizer, self.undoing)
        switch.on(optimizer)
        for handle in (
            optimizer.register_step_pre_hook(FusedStepCheck(switch.check)),
            optimizer.register_load_state_dict_post_hook(switch.after_load),
            optimizer.register_state_dict_post_hook(switch.users_flags),
        ):
            self.undoing.callback(handle.remove)


class _Switch:
    """Sets the flags of one optimizer, and restores the user's."""

    def __init__(self, sparse: set[int]) -> None:
        self._sparse = sparse
        self._users: dict[int, dict[str, Any]] = {}  # by a group's index, since load_state_dict creates new groups
        self._dtypes: dict[int, torch.dtype] = {}  # of parameters whose states were looked at, by their ids

    def on(self, optimizer: Optimizer) -> None:
        for place, group in enumerate(optimizer.param_groups):
            if not _group_refusal(group, self._sparse):
                self._users[place] = {flag: group.get(flag) for flag in _FLAGS}
                group.update(fused=True, foreach=False)
        _steps_as_float32(optimizer)

    def off(self, optimizer: Optimizer) -> None:
        for place in list(self._users):
            self._give_back(place, optimizer.param_groups)

    def after_load(self, optimizer: Optimizer) -> None:
        self._users.clear()  # the loaded groups have the flags of the saved optimizer
        self._dtypes.clear()
        self.on(optimizer)

    def users_flags(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        for place, flags in self._users.items():
            if place < len(state_dict["param_groups"]):
                state_dict["param_groups"][place].update(flags)
        return state_dict

    def check(self, optimizer: Optimizer) -> None:
        """Restore the flags of a group on which the fused kernels would raise in this step."""
        for place in list(self._users):
            if place < len(optimizer.param_groups) and not self._is_ready(optimizer, optimizer.param_groups[place]):
                self._give_back(place, optimizer.param_groups)

    def _is_ready(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        """Whether the fused kernel supports the gradients and the state of `group` in this step."""
        for parameter in group["params"]:
            gradient = gradient_of(parameter)
            if gradient is not None and gradient.layout is not torch.strided:
                return False
            if self._dtypes.get(id(parameter)) is not parameter.dtype:  # it is new, or was converted
                if not _has_state_of_its_dtype(optimizer, parameter):
                    return False
                self._dtypes[id(parameter)] = parameter.dtype
        return not group.get("momentum") or _has_all_momenta(optimizer, group)

    def _give_back(self, place: int, groups: list[dict[str, Any]]) -> None:
        flags = self._users.pop(place)
        if place < len(groups):
            groups[place].update(flags)


def _refusal(optimizer: Optimizer, sparse: set[int]) -> SkipReason | None:
    """Return the reason why no group of `optimizer` can be switched, or None."""
    name = type(optimizer).__name__
    own = type(optimizer) if type(optimizer) in own_kernels.KINDS else None
    kernel = own or next((kind for kind in _HAVE_KERNELS if isinstance(optimizer, kind)), None)
    if kernel is None:
        return SkipReason("no_kernel", f"{name} has no fused CPU kernel")
    if own is not None and optimizer_steps.KERNEL.unavailable is not None:
        return SkipReason("no_kernel", f"{name}: {for_report(optimizer_steps.KERNEL.unavailable)}")
    if type(optimizer).step is not kernel.step:
        return SkipReason("own_step", f"{name} overrides step()")
    reasons = [_group_refusal(group, sparse) for group in optimizer.param_groups]
    first = reasons[0] if reasons and all(reasons) else None
    return None if first is None else first._replace(detail=f"{name}: {first.detail}")


def _group_refusal(group: dict[str, Any], sparse: set[int]) -> SkipReason | None:
    if group.get("fused"):
        return None  # set by the user or by an enclosing run; only the layout has to be guarded
    if group.get("fused") is not None or group.get("foreach") is not None:
        flag = "fused" if group.get("fused") is not None else "foreach"
        return SkipReason("users_flag", f"it was built with {flag}=")
    if group.get("differentiable") or group.get("capturable") or isinstance(group.get("lr"), torch.Tensor):
        return SkipReason("differentiable", "it is differentiable, capturable or has a tensor as its lr")
    if any(not parameter.is_floating_point() for parameter in group["params"]):
        return SkipReason("complex", "it has complex parameters")
    if any(parameter.device.type != "cpu" for parameter in group["params"]):
        return SkipReason("not_on_cpu", "its parameters are not on the CPU")
    if not all(map(is_dense, group["params"])):
        return SkipReason("overlapping", "its parameters overlap in memory")
    if any(id(parameter) in sparse for parameter in group["params"]):
        return SkipReason("sparse", "its embeddings have sparse gradients")
    return None


def _sparse_parameters(models: list[nn.Module]) -> set[int]:
    modules = [module for model in models for module in model.modules()]
    embeddings = [module for module in modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    return {id(module.weight) for module in embeddings if module.sparse}


def _has_state_of_its_dtype(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether the fused kernel can read the states: after ``model.double()`` they are still those of fp32."""
    states = state_of(optimizer).get(parameter, {})
    tensors = [value for name, value in states.items() if name != "step" and isinstance(value, torch.Tensor)]
    return all(value.dtype is parameter.dtype for value in tensors)


def _has_all_momenta(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Add zero momentum to parameters that SGD steps for the first time, such as those of an unfrozen layer.

    torch's fused SGD raises if only some parameters have a momentum buffer. Without dampening, a first step equals a
    step from zero momentum. With dampening it does not, and the unfused kernel has to do this step.
    """
    stepped = [parameter for parameter in group["params"] if gradient_of(parameter) is not None]
    late = [parameter for parameter in stepped if state_of(optimizer)[parameter].get("momentum_buffer") is None]
    if not late or len(late) == len(stepped):
        return True
    if group["dampening"]:
        return False
    for parameter in late:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
    return True


def _steps_as_float32(optimizer: Optimizer) -> None:
    """Cast step counters to float32, as the fused kernels require; with a float64 default dtype, they are float64."""
    for state in optimizer.state.values():
        if isinstance(state, dict) and isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(torch.float32)
