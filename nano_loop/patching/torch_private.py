"""All uses of private names, of torch and of what comes with it, each with its reason.

Those of `torch.compile`, autograd, loaders and optimizers are in the modules ``torch_private_…`` beside it. The tests
of these modules fail if one of the names is missing.
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

#: What all public functions that switch the deterministic mode call, also where a script has imported them by name.
SETTER_OF_DETERMINISM = (torch._C, "_set_deterministic_algorithms")

#: What `functional.cross_entropy` and `functional.nll_loss` call, also where a script has imported them by name.
ROW_LOSSES = (torch._C._nn, ("cross_entropy_loss", "nll_loss_nd"))

#: Operators without public names: attention by blocks on the CPU, and bags of rows with a gradient.
FLASH_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
BAGS_KERNEL = "_embedding_bag"


#: The hooks of a module, and what it is compiled to; at once, for that is asked in each call.
_hooks = operator.attrgetter(
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
)


#: The hooks of all modules.
_hooks_of_all = tuple(
    getattr(nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)


def calls_only_forward(module: nn.Module) -> bool:
    """Whether a call of a module is one of its class's `forward`, without hooks. torch has no public check."""
    return not any(_hooks(module)) and not any(_hooks_of_all) and "forward" not in vars(module)


#: Whether `torch.jit.trace` records this thread's operators. The public function costs two more frames, in each call.
is_tracing: Callable[[], bool] = torch._C._is_tracing


def in_functorch() -> bool:
    """Whether a `torch.func` transform such as ``vmap`` or ``grad`` is active. Its tensors look like plain ones."""
    return bool(torch._C._are_functorch_transforms_active())


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor is batched, as a gradient is under ``is_grads_batched``. Such a tensor has no memory."""
    functorch = torch._C._functorch
    return bool(functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor))


def in_mode() -> bool:
    """Whether a mode of torch sees the functions or operators of this thread. torch has no public check."""
    return in_dispatch_mode() or bool(torch._C._len_torch_function_stack())


def in_dispatch_mode() -> bool:
    """Whether a mode sees the operators of this thread, as one that traces does. torch has no public check."""
    return bool(torch._C._len_torch_dispatch_stack())


def without_memory(
    kind: type[torch.Tensor], shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0
) -> torch.Tensor:
    """Return a tensor of a subclass on the CPU that has no memory. What asks for its address to write gets an error.

    What a subclass does not answer itself reaches its ``__torch_dispatch__``. There is no public way to make one.
    """
    device = torch.device("cpu")
    tensor: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, shape, strides, storage_offset=offset, dtype=dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def as_plain_tensors() -> AbstractContextManager[None]:
    """Return a context in which subclasses of tensors do not see functions, as in their base class's own."""
    return torch._C.DisableTorchFunctionSubclass()


def has_saved_tensor_hooks() -> bool:
    """Whether hooks pack what this thread's operators save for their backward, as an activation checkpoint's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


#: The attribute that `version` reads.
VERSION = "_version"


def version(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor, which in-place changes increment. Inference tensors have none: 0."""
    return 0 if tensor.is_inference() else int(tensor._version)


def shared_until_written(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares memory with another one until somebody writes to one of them, which is copied first.

    What reads the address counts as a write, as do numpy and DLPack. Raises a `RuntimeError` for memory that is not
    torch's own, as that of a mapped file.
    """
    return torch._lazy_clone(tensor)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether nobody has written to a strided tensor since it began to share memory by `shared_until_written`."""
    return bool(torch._C._is_cow_tensor(tensor))  # type: ignore[attr-defined]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage. `Tensor.data_ptr` would copy what is shared until it is written."""
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]


def python_library() -> str:
    """Return the path of the library by which Python uses torch. No public name has it."""
    return torch._C.__file__


def has_lone_storage(tensor: torch.Tensor) -> bool:
    """Whether no other tensor has the memory of this one, nor DLPack this one. torch has no public counts."""
    is_alone: bool = tensor._use_count() == 1  # type: ignore[attr-defined]
    return is_alone and users_of_storage(tensor) == 1


def users_of_storage(tensor: torch.Tensor) -> int:
    """Return how many tensors, and other objects, have the memory of a tensor. torch has no public count."""
    return _count_of_users(tensor) - _count_of_a_lone_user() + 1


def _count_of_users(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()  # which is another user
    return int(torch._C._storage_Use_Count(storage._cdata))


@functools.cache
def _count_of_a_lone_user() -> int:
    return _count_of_users(torch.empty(1, device="cpu"))


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that another one is a view of, or the tensor itself. torch documents no public name."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
#: The operators by which `torch.distributions` samples `Gamma`, `Beta` and `Dirichlet`.
SAMPLING = ("_standard_gamma", "_sample_dirichlet")


def below_torch_functions() -> AbstractContextManager[None]:
    """Return a context in which no `TorchFunctionMode` of the user's or of `disable_casts` sees a call."""
    # There is no public way past a mode that somebody else has entered.
    return torch._C.DisableTorchFunction()


def below_autocast() -> AbstractContextManager[None]:
    """Return a context in which operators skip autocast, as in torch's own autocast kernels.

    Twice as fast as leaving autocast by its public context manager.
    """
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def as_without_autocast_kernel(operator: Any, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as if it had no kernel for autocast; the operators that it is composed of have theirs."""
    # While a compiler traces, Python's dispatcher comes first, and would begin with all keys again: autocast's, too.
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
    """Whether this torch has an ATen operator, such as ``softmax.int``. torch has no public check without an error."""
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
    """Unregister the kernels of a library immediately. torch does it when the library is garbage-collected."""
    library._destroy()  # type: ignore[no-untyped-call]


def copy_as_torch(target: torch.Tensor, source: Any, non_blocking: bool) -> torch.Tensor:
    """Do what ``aten::copy_`` does on a CPU, also while its kernel for the CPU is replaced."""
    kernel = torch.ops.aten.copy_.default._op_dk
    copied: torch.Tensor = kernel(torch._C.DispatchKey.CompositeExplicitAutograd, target, source, non_blocking)
    return copied


def bytes_of(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the untyped storage of a typed one, without the deprecation warning of the public method."""
    return storage._untyped_storage


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into those of another list. A loop over `copy_` takes 1 µs more for each."""
    if targets and not any(map(torch.Tensor.is_conj, targets)) and not any(map(torch.Tensor.is_neg, targets)):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):  # it refuses lazy signs, and an empty list
        target.copy_(source)


def forget_group_count() -> None:
    """Let torch number process groups from 0 again, as after `destroy_process_group`.

    It counts a group whose creation fails, and ranks that count differently do not find each other.
    """
    distributed_c10d._world.group_count = 0


def put_back_signal_handlers(trainer: Any) -> None:
    """Let a Trainer of Lightning put back the handlers of signals that it has found. It has no public name for it."""
    trainer._signal_connector.teardown()
