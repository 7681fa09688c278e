"""Lets optimizers use torch's fused kernels, which update a parameter in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from typing_extensions import override

from nano_loop.optimizers.direct_steps import stepped_directly
from nano_loop.optimizers.torch_fused_steps import has_own_steps
from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with
from nano_loop.patching.members import parameters_of
from nano_loop.patching.optimizers import is_dense
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SkipReason, Step

#: To add an optimizer, see `nano_loop.optimizers`.
_HAVE_KERNELS = (AdamW, Adam, SGD, Adagrad)


class FusedOptimizer(Step):
    """Lets an optimizer use torch's fused kernels if they compute the same as its own loop over operators.

    This is checked at each step for each group (see `nano_loop.optimizers.torch_fused_steps`); the program's flags
    stay.
    """

    name = "fused_optimizer"
    needs = "optimizers"

    @override
    def begin(self) -> None:
        self._fused: Any = WeakIdKeyDictionary()  # optimizers, by weak references

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
            if optimizer not in self._fused and not has_own_steps(optimizer):
                self._fused[optimizer] = True
                undoing = undone_with(optimizer, self.undoing)
                undoing.enter_context(stepped_directly(optimizer))
        return "; ".join([", ".join(dict.fromkeys(fused)), *dict.fromkeys(refused)])

    def _refusals(self, parts: TrainingObjects) -> list[SkipReason | None]:
        sparse = _sparse_parameters(parts.models)
        is_known = [optimizer in self._fused or has_own_steps(optimizer) for optimizer in parts.optimizers]
        optimizers = zip(parts.optimizers, is_known, strict=True)
        return [None if known else _refusal(optimizer, sparse) for optimizer, known in optimizers]


def _refusal(optimizer: Optimizer, sparse: set[int]) -> SkipReason | None:
    """Return the reason why no group of `optimizer` can be fused, or None."""
    name = type(optimizer).__name__
    kernel = next((kind for kind in _HAVE_KERNELS if isinstance(optimizer, kind)), None)
    if kernel is None:
        return SkipReason("no_kernel", f"{name} has no fused CPU kernel")
    if type(optimizer).step is not kernel.step:
        return SkipReason("own_step", f"{name} overrides step()")
    reasons = [_group_refusal(group, sparse) for group in optimizer.param_groups]
    first = reasons[0] if reasons and all(reasons) else None
    return None if first is None else first._replace(detail=f"{name}: {first.detail}")


def _group_refusal(group: dict[str, Any], sparse: set[int]) -> SkipReason | None:
    if group.get("fused"):
        return None  # the user requested it; only the layout must be checked
    if group.get("fused") is not None or group.get("foreach") is not None:
        flag = "fused" if group.get("fused") is not None else "foreach"
        return SkipReason("users_flag", f"it was built with {flag}=")
    if group.get("differentiable") or group.get("capturable") or isinstance(group.get("lr"), torch.Tensor):
        return SkipReason("differentiable", "it is differentiable, capturable or has a tensor as its lr")
    if not all(weight.is_floating_point() and weight.is_cpu and is_dense(weight) for weight in group["params"]):
        return SkipReason("unusual", "its parameters are complex, not on the CPU, or overlap in memory")
    if any(id(parameter) in sparse for parameter in group["params"]):
        return SkipReason("sparse", "its embeddings have sparse gradients")
    return None


def _sparse_parameters(models: list[nn.Module]) -> set[int]:
    modules = [module for model in models for module in model.modules()]
    embeddings = [module for module in modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    sparse = [module for module in embeddings if module.sparse]
    # The attribute is not read, which would compute a parametrized weight.
    return {id(weight) for module in sparse for weight in parameters_of(module, recurse=False)}
