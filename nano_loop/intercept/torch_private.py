"""The only place where names are used that torch keeps for itself, each with the reason why.

`tests/intercept/test_torch_private.py` fails when one of them is gone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.utils.data import DataLoader

_FUSED_CHECK = "_need_device_dtype_check_for_fused"
_KEPT_ITERATOR = "_iterator"
_ORIGINAL_FUNCTION = "_torchdynamo_orig_callable"
_COMPILER = "torch._dynamo.eval_frame"

#: The attributes of a leaf tensor that hold its hooks, which pickling leaves behind.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


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


def next_node_number() -> int:
    """Return the number that the next autograd node of this thread gets; they count up."""
    return int(torch._C._autograd._get_sequence_nr())


def current_node_number() -> int | None:
    """Return the number of the autograd node whose backward this thread is running, None outside of one."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


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


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator that a loader with ``persistent_workers`` keeps between epochs; None if it has none."""
    return vars(loader).get(_KEPT_ITERATOR)


def own_iterator(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the one attribute of a loader in which it keeps its iterator."""
    return {_KEPT_ITERATOR: kept_iterator(loader)}


def without_kept_iterator(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a loader's attributes for a copy that starts its own worker processes."""
    return {**attributes, _KEPT_ITERATOR: None}


def stop_kept_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes that a loader keeps between epochs, also where a traceback still holds them."""
    iterator = kept_iterator(loader)
    vars(loader)[_KEPT_ITERATOR] = None
    if iterator is not None:
        iterator._shutdown_workers()  # what it calls when it is collected


def is_watched_by_scheduler(step: Any) -> bool:
    """Whether an optimizer's `step` is the function that a scheduler has put there to note the call."""
    return hasattr(step, "_wrapped_by_lr_sched")


def bytes_of(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the storage inside a typed one, without the warning that its own method gives."""
    return storage._untyped_storage


def compiled_call(module: nn.Module) -> Any:
    """Return what `module.compile()` has made of the module's call; None where it was not called."""
    return vars(module).get("_compiled_call_impl")


def compile_call(module: nn.Module, context: Callable[[Any], Any]) -> None:
    """Compile a module in place by the context of another one that was; see `compile_context`."""
    module._compiled_call_impl = context(module._call_impl)


def compile_context(compiled: Any) -> Any:
    """Return what `torch.compile` has wrapped a function by, which can be pickled and called; None for others."""
    # Where it was made, since functools.wraps copies torch's marks to other functions.
    made_by_torch = isinstance(compiled, FunctionType) and compiled.__globals__.get("__name__") == _COMPILER
    if not made_by_torch or _ORIGINAL_FUNCTION not in vars(compiled):
        return None
    return inspect.getclosurevars(compiled).nonlocals.get("self")


def uncompiled(function: FunctionType) -> Any:
    """Return the function that `torch.compile` was given, for one that has a `compile_context`."""
    return vars(function)[_ORIGINAL_FUNCTION]
