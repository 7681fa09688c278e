"""Private names of torch's autograd, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

#: The attributes of a leaf tensor that hold its hooks, which pickling omits.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active in this process. torch has no public check."""
    return forward_ad._current_level >= 0


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks, which may replace its gradient. torch has no public way to list them."""
    return bool(tensor._backward_hooks)


def is_seen_by_program(view: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether the backward runs code of the program, or keeps a gradient for it, between a view of a result and it.

    The view shares memory with the result, or is the result itself. Hooks of nodes are not noticed.
    """
    if not view.requires_grad:
        return False
    if any(has_tensor_hooks(tensor) or tensor.retains_grad for tensor in (view, result)):
        return True
    node: Any = view.grad_fn
    last = result.grad_fn
    while node is not last:
        if node is None or isinstance(node, BackwardCFunction) or len(node.next_functions) != 1:
            return True
        node = node.next_functions[0][0]
    return False


def in_backward() -> bool:
    """Whether this thread is running a backward, including one that recomputes the forward of a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


#: Returns the unique id of the backward that this thread is running, or -1 outside a backward.
graph_task: Callable[[], int] = torch._C._current_graph_task_id

#: Whether the current backward of this thread reaches a leaf of the graph, by the node that accumulates its gradient.
#: The leaf must not be in the ``inputs`` of the backward. torch has no public check.
reaches: Callable[[Any], bool] = torch._C._will_engine_execute_node

#: Returns the sequence number of the next autograd node of this thread. Numbers increase monotonically.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def current_node_number() -> int | None:
    """Return the sequence number of the node whose backward this thread is running, or None outside a backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def output_numel(node: Any, place: int) -> int:
    """Return the number of elements of an output of an autograd node. torch has no public way."""
    return math.prod(node._input_metadata[place].shape)


def reduction_of(node: Any) -> int | None:
    """Return the number of the reduction of a loss function's node, or None for other nodes."""
    reduction: int | None = getattr(node, "_saved_reduction", None)
    return reduction


def input_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the first input of a node that has a gradient; empty if there is none."""
    for function, place in node.next_functions:
        if function is not None:
            return tuple(function._input_metadata[place].shape)
    return ()


def is_selected_by_mask(node: Any) -> bool:
    """Whether a node is that of ``x[mask]``."""
    if not node.name().startswith("IndexBackward"):
        return False
    return all(index is None or index.dtype is torch.bool for index in node._saved_indices)


def dimensions_of(node: Any) -> set[int]:
    """Return the dimensions of the first input that an operator reduces or sorts; empty if its node saves none."""
    saved = getattr(node, "_saved_dim", None)
    saved = getattr(node, "_saved_dims", None) if saved is None else saved
    dimensions = [saved] if isinstance(saved, int) else saved or ()
    count = len(input_shape(node))
    # Negative numbers are saved as unsigned ones.
    signed = (one - (1 << 64) if one >= 1 << 63 else one for one in dimensions)
    return {one % count for one in signed} if count else set()


def node_number(node: Any) -> int:
    """Return the sequence number of an autograd node."""
    return int(node._sequence_nr())


def queue_callback(function: Callable[[], object]) -> None:
    """Run `function` at the end of the current backward of this thread, before ``backward()`` returns.

    It does not run if the backward raises. ``backward()`` propagates its exceptions. torch's FSDP does the same.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[arg-type]


def has_accumulation_hook(parameter: torch.Tensor, handle: RemovableHandle) -> bool:
    """Whether a parameter has the hook of this handle. `torch.utils.swap_tensors` moves hooks to the other tensor."""
    return parameter._post_accumulate_grad_hooks is handle.hooks_dict_ref()


def forget_empty_hooks(parameter: torch.Tensor) -> None:
    """Remove the dict that `register_post_accumulate_grad_hook` leaves on a tensor, if it is empty."""
    if not parameter._post_accumulate_grad_hooks:
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def replace_saved(node: Any, name: str, value: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
    """Let an autograd node keep `value` instead of a tensor that it has saved; `unpack` returns the tensor for it.

    torch documents ``_raw_saved_`` attributes, in its notes on autograd.
    """
    getattr(node, f"_raw_saved_{name}").register_hooks(lambda tensor: value, unpack)


def saved_output(node: Any, name: str) -> torch.Tensor | None:
    """Return the output that an autograd node has saved. Return None if it was written to since, or if hooks packed it.

    Such hooks belong to the program or to a checkpoint, which would compute everything again to return it.
    """
    if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", None) is not None:
        return None
    try:
        output: torch.Tensor = getattr(node, f"_saved_{name}")
    except RuntimeError:
        return None
    return output


def saves_output(node: Any) -> bool:
    """Whether an autograd node saves its output, as that of tanh does."""
    return hasattr(node, "_raw_saved_result") or hasattr(node, "_raw_saved_output")
