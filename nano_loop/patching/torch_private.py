"""All uses of private names of torch and its dependencies, each with the reason for its use.

Names of `torch.compile`, autograd, loaders and optimizers are in the ``torch_private_…`` modules next to this one. The
tests of these modules fail if a name is missing. Other code that depends on torch's version calls `is_older_than` or
names the version in a comment. The largest parts:

- Whether torch returns the kernels of operators, which most of our functions call (2.9 and later):
  `nano_loop.patching.operators.gives_kernels`.
- How autocast handles operators: `nano_loop.precision.autocast.default_ops` and `widest_dtype`.
- IPEX, which requires torch 2.8: `nano_loop.integrations.ipex`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.modules.loss import _Loss


def is_older_than(major: int, minor: int) -> bool:
    """Return whether this torch is older than a version."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (major, minor)


#: Called by `functional.cross_entropy` and `functional.nll_loss`, even if a script imported them by name.
ROW_LOSSES = (torch._C._nn, ("cross_entropy_loss", "nll_loss_nd"))

#: Operators without public names: block-wise attention on the CPU, and embedding bags with a gradient.
FLASH_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
BAGS_KERNEL = "_embedding_bag"


#: A module's hooks and compiled call, read by one call because each module call checks them.
_hooks = operator.attrgetter(
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
)


#: The global hooks of all modules.
_hooks_of_all = tuple(
    getattr(nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)


def calls_only_forward(module: nn.Module) -> bool:
    """Whether calling a module only calls its class's `forward`, without hooks. torch has no public check."""
    return not any(_hooks(module)) and not any(_hooks_of_all) and "forward" not in vars(module)


#: Whether `torch.jit.trace` is recording in this thread. The public function costs two more frames per call.
is_tracing: Callable[[], bool] = torch._C._is_tracing


#: Whether a `torch.func` transform such as ``vmap`` or ``grad`` is active. Its tensors look like plain ones.
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor is batched, such as a gradient with ``is_grads_batched``. Such tensors have no memory."""
    functorch = torch._C._functorch
    return bool(functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor))


def in_mode() -> bool:
    """Whether a torch function or dispatch mode is active in this thread. torch has no public check."""
    return in_dispatch_mode() or bool(torch._C._len_torch_function_stack())


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode, such as a tracer, is active in this thread. torch has no public check."""
    return bool(torch._C._len_torch_dispatch_stack())


def without_memory(
    kind: type[torch.Tensor], shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0
) -> torch.Tensor:
    """Return a tensor of a subclass on the CPU without memory. Requesting a writable data pointer raises an error.

    Calls that the subclass does not handle reach its ``__torch_dispatch__``. There is no public way to create one.
    """
    device = torch.device("cpu")
    tensor: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, shape, strides, storage_offset=offset, dtype=dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


#: Returns a context that bypasses ``__torch_function__`` of tensor subclasses, as in their base class's own.
as_plain_tensors: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def has_saved_tensor_hooks() -> bool:
    """Whether hooks pack the tensors that this thread saves for backward, as in activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


#: The attribute that `version` reads.
VERSION = "_version"


def version(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor, which in-place changes increment; 0 for inference tensors."""
    return 0 if tensor.is_inference() else int(tensor._version)


#: Returns a copy-on-write tensor: it shares memory with another one until either is written to.
#:
#: Reading the data pointer counts as a write, as numpy and DLPack do. Raises a `RuntimeError` for memory that torch
#: did not allocate, such as that of a mapped file.
shared_until_written: Callable[[torch.Tensor], torch.Tensor] = torch._lazy_clone

#: Whether a strided tensor has not been written to since `shared_until_written`.
is_unwritten: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]

#: Returns the address of a tensor's storage. `Tensor.data_ptr` would copy copy-on-write memory.
address_of: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]


def python_library() -> str:
    """Return the path of torch's Python binding library. There is no public name for it."""
    return torch._C.__file__


def has_lone_storage(tensor: torch.Tensor) -> bool:
    """Whether no other tensor or DLPack capsule shares this tensor's memory. torch has no public counts."""
    is_alone: bool = tensor._use_count() == 1  # type: ignore[attr-defined]
    return is_alone and users_of_storage(tensor) == 1


def users_of_storage(tensor: torch.Tensor) -> int:
    """Return the number of tensors and other objects that share a tensor's memory. torch has no public count."""
    return _count_of_users(tensor) - _count_of_a_lone_user() + 1


def _count_of_users(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()  # counts as another user
    return int(torch._C._storage_Use_Count(storage._cdata))


@functools.cache
def _count_of_a_lone_user() -> int:
    return _count_of_users(torch.empty(1, device="cpu"))


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, or the tensor itself if it is not a view. torch documents no public name."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
#: The operators that `torch.distributions` uses to sample `Gamma`, `Beta` and `Dirichlet`.
SAMPLING = ("_standard_gamma", "_sample_dirichlet")


#: Returns a context in which no `TorchFunctionMode`, the user's or `disable_casts`, sees a call. There is no public way
#: to bypass a mode that other code entered.
below_torch_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


def below_autocast() -> AbstractContextManager[None]:
    """Return a context in which operators skip autocast, as in torch's own autocast kernels.

    Twice as fast as disabling autocast by its public context manager.
    """
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def as_without_autocast_kernel(operator: Any, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as if it had no autocast kernel; operators that it calls still use theirs."""
    # During tracing, Python's dispatcher comes first and would restart with all keys, including autocast's.
    for key in (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.PythonDispatcher):
        keys = keys.remove(key)
    return operator.redispatch(keys, *args, **kwargs)


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Whether an operator, such as ``softmax.int``, has a kernel for a dispatch key. torch has no public check."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full_name(operator), dispatch_key))
    except RuntimeError:  # this torch has no such operator
        return False


def is_operator(name: str) -> bool:
    """Whether this torch has an ATen operator, such as ``softmax.int``. Public lookups raise an error if not."""
    return bool(torch._C._dispatch_has_kernel(full_name(name)))


def full_name(operator: str) -> str:
    """Return the name of an ATen operator with its namespace."""
    return f"aten::{operator}"


def arguments_of(overload: Any) -> list[Any]:
    """Return the arguments of an ATen operator's overload, with their types and aliases."""
    return list(overload._schema.arguments)


def is_loss(module: nn.Module) -> bool:
    """Whether a module is one of torch's losses. Their common base class has no public name."""
    return isinstance(module, _Loss)


def safe_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension, as in torch's attention: 0 where all are -inf."""
    return torch.ops.aten._safe_softmax(scores, -1)  # type: ignore[no-any-return]


def sums_of_bags(weight: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Call ``aten::_embedding_bag``, the operator of `torch.nn.functional.embedding_bag` with a gradient."""
    results: tuple[torch.Tensor, ...] = torch.ops.aten._embedding_bag(weight, *args)
    return results


def destroy_library(library: torch.library.Library) -> None:
    """Unregister the kernels of a library immediately, rather than when it is garbage-collected."""
    library._destroy()  # type: ignore[no-untyped-call]


def copy_as_torch(target: torch.Tensor, source: Any, non_blocking: bool) -> torch.Tensor:
    """Run the original CPU kernel of ``aten::copy_``, even while it is replaced."""
    kernel = torch.ops.aten.copy_.default._op_dk
    copied: torch.Tensor = kernel(torch._C.DispatchKey.CompositeExplicitAutograd, target, source, non_blocking)
    return copied


def bytes_of(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the untyped storage of a typed one, without the deprecation warning of the public method."""
    return storage._untyped_storage


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors from one list into another. A loop over `copy_` takes 1 µs more per tensor."""
    if targets and not any(map(torch.Tensor.is_conj, targets)) and not any(map(torch.Tensor.is_neg, targets)):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):  # the operator rejects lazy signs and empty lists
        target.copy_(source)


def forget_group_count() -> None:
    """Make torch number process groups from 0 again, as after `destroy_process_group`.

    torch also counts failed groups, and ranks whose counts differ cannot find each other.
    """
    distributed_c10d._world.group_count = 0


def put_back_signal_handlers(trainer: Any) -> None:
    """Make a Lightning Trainer restore the signal handlers that it replaced. There is no public method for it."""
    trainer._signal_connector.teardown()
