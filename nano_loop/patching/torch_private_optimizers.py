"""The uses of private names of `torch.optim` and its kernels; see `nano_loop.patching.torch_private`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer, _functional
from torch.optim import optimizer as torch_optimizer

from nano_loop.patching.attributes import module_of, replaced

_ONE = torch.tensor(1.0, dtype=torch.float32, device="cpu")
_INIT_GROUP = "_init_group"
_STEP_HOOKS = "_optimizer_step_pre_hooks"


def groups_prepared(
    kind: type[Optimizer], make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Replace the method that builds the lists of a group's tensors, which `step` passes to its functional API.

    It receives the group and the lists, the parameters first. Dynamo gives each class its own method.
    """
    owner = next(base for base in kind.__mro__ if _INIT_GROUP in vars(base))
    return replaced(owner, _INIT_GROUP, make)


def preparing(optimizer: Optimizer) -> Any:
    """Return the method of an optimizer that builds these lists."""
    return getattr(optimizer, _INIT_GROUP)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be registered on an optimizer, because its class called ``Optimizer.__init__``."""
    return _STEP_HOOKS in vars(optimizer)


def hooks_before_step(optimizer: Optimizer) -> Iterator[Any]:
    """Return the pre-step hooks of an optimizer. torch has no public way to list them."""
    return chain(torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())


def hooks_after_step(optimizer: Optimizer) -> Iterator[Any]:
    """Return the post-step hooks of an optimizer."""
    return chain(optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values())


def unhooked_step(step: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function that torch wrapped to run hooks around it, or None if torch did not wrap it last.

    torch wraps the ``step`` of a class when its first optimizer is built, and marks the wrapper.
    """
    if not getattr(step, "hooked", False):
        return None
    while getattr(step, "hooked", False):
        if module_of(step).partition(".")[0] not in ("torch", "nano_loop"):
            return None
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step if module_of(step) == torch_optimizer.__name__ else None


#: Whether a torch profiler is running. Public functions only start and stop one.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

#: Steps a group with Adagrad's fused kernel. It takes lists of parameters, gradients, sums and counters.
fused_adagrad: Callable[..., None] = torch._fused_adagrad_

#: Steps parameters with sparse gradients as `torch.optim.SparseAdam` does, with the lists of Adam.
sparse_adam: Callable[..., None] = _functional.sparse_adam


def fused_adam(
    *lists: list[torch.Tensor], betas: tuple[float, float], decoupled_weight_decay: bool, **numbers: Any
) -> None:
    """Call the fused kernel of Adam or AdamW with the names of torch's settings. Its public functions group tensors."""
    *others, counters = lists
    kernel: Any = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
    kernel(*others, [], counters, amsgrad=False, beta1=betas[0], beta2=betas[1], **numbers)


def fused_sgd(
    parameters: list[torch.Tensor], gradients: list[torch.Tensor], momenta: Sequence[torch.Tensor] = (), **numbers: Any
) -> None:
    """Call the fused kernel of SGD for all steps but the first."""
    torch._fused_sgd_(parameters, gradients, [*momenta], is_first_step=False, **numbers)


def foreach_increment(counters: list[torch.Tensor]) -> None:
    """Add 1 to each counter of a non-empty list."""
    torch._foreach_add_(counters, [_ONE] * len(counters))  # a Python number takes three times as long


def is_watched_by_scheduler(step: Any) -> bool:
    """Whether an optimizer's `step` is the wrapper that a scheduler installs to detect calls."""
    return hasattr(step, "_wrapped_by_lr_sched")
