"""The only place where names are used that torch keeps for itself, each with the reason why.

`tests/mechanisms/test_torch_private.py` tells when one of them is gone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

_FUSED_CHECK = "_need_device_dtype_check_for_fused"


def is_compiled(model: nn.Module) -> bool:
    """Whether a model was given to `torch.compile` or to its own `compile()`, for which torch has no question."""
    return isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None


def forget_compiled(model: nn.Module) -> None:
    """Take back `model.compile()`, for which torch has no call."""
    vars(model).pop("_compiled_call_impl", None)


def in_backward() -> bool:
    """Whether this thread is running a backward, as when an activation checkpoint computes its forward again."""
    return bool(torch._C._current_graph_task_id() != -1)


def graph_task() -> int:
    """Return the number of the backward that this thread is running, and -1 outside of one; no two have the same."""
    return int(torch._C._current_graph_task_id())


def queue_callback(function: Callable[[], None]) -> None:
    """Run `function` at the end of the backward that this thread is in, before ``backward()`` returns.

    It is not run if the backward raises; what it raises itself, ``backward()`` raises. torch's own FSDP does this.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def forget_empty_hooks(parameter: torch.Tensor) -> None:
    """Drop the dict that `register_post_accumulate_grad_hook` leaves on a tensor, where no hook is left in it."""
    if not parameter._post_accumulate_grad_hooks:
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def in_functorch() -> bool:
    """Whether a `torch.func` transform such as ``vmap`` or ``grad`` is at work, whose tensors look like plain ones."""
    return bool(torch._C._are_functorch_transforms_active())


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been changed in place; under inference mode nobody counts, and it is always 0."""
    return 0 if tensor.is_inference() else int(tensor._version)


def fused_check_pending(optimizer: Optimizer) -> bool:
    """Whether an optimizer has not yet looked at the dtypes of its parameters, as it does at the first fused step."""
    return _FUSED_CHECK not in vars(optimizer)


def forget_fused_check(optimizer: Optimizer) -> None:
    """Remove the attribute that SGD and Adagrad give themselves at the first fused step."""
    vars(optimizer).pop(_FUSED_CHECK, None)


def is_loss(module: nn.Module) -> bool:
    """Whether a module is one of torch's losses, whose common base class has no public name."""
    return isinstance(module, _Loss)


def softmax_backward(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a softmax over the last dimension from that of its output, in the output's dtype."""
    return torch.ops.aten._softmax_backward_data(gradient, output, -1, output.dtype)  # type: ignore[no-any-return]


def destroy_library(library: torch.library.Library) -> None:
    """Take back at once what a library has registered, which torch else does when the library is collected."""
    library._destroy()  # type: ignore[no-untyped-call]
