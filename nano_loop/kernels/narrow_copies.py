"""Keeps fp32 tensors for the backward in bf16 where a product has rounded them anyway.

torch's graph keeps the factors of a product in fp32, although the backward rounds them again. Once the forward has
rounded a factor, its bf16 copy takes the place of the fp32 tensor in the graph, also in the operators beside it that
keep the same tensor: the ReLU that computed it, and the batch norm that reads the result of a convolution, which is
rounded as well. So an activation takes two bytes instead of four, and no gradient changes.

Kernels of backwards get the copies themselves if they are replaced now (`reads_copies` of
`nano_loop.kernels.override.Override`). Everything else gets them converted to fp32: graphs of second derivatives,
transforms, modes, and backwards after the run. Tensors that other hooks pack, as checkpoints do, are left to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from nano_loop.kernels.memory import computes_now, is_plain
from nano_loop.kernels.override import FP32, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.patching.optimizers import is_dense, lies_as
from nano_loop.patching.ownership import call_state
from nano_loop.patching.patch_table import users
from nano_loop.patching.torch_private import FLASH_KERNEL, base_of, has_saved_tensor_hooks, version
from nano_loop.patching.torch_private_autograd import in_forward_mode, replace_saved, saved_output, saves_output

#: Minimum number of elements of a tensor. Below it, the memory is not worth the Python overhead.
MIN_ELEMENTS = 1 << 18


class _Copy(NamedTuple):
    """The bf16 copy of a tensor at a version. `values` returns it, or None if it was freed."""

    version: int
    values: Callable[[], Tensor | None]


#: In place of the copy of a tensor that the program may write to without changing its version.
_NONE = _Copy(-1, lambda: None)


class _State:
    """The state of a thread."""

    def __init__(self) -> None:
        #: The factors that the graph of the current product keeps. Empty outside of such a call.
        self.factors: tuple[Tensor, ...] = ()
        self.copies: dict[int, Tensor] = {}  # those that it has rounded, in bf16, by their position
        self.result: tuple[Tensor, Tensor] | None = None  # its result in fp32 and, with the same values, in bf16
        #: The copies of factors, which live as long as a graph keeps them, by the tensor that has the factor's memory.
        self.kept: Any = WeakTensorKeyDictionary()
        #: The bf16 values of the last product's result, until the result is freed or another product is computed: the
        #: operator that reads the result is not known yet.
        self.last: Any = WeakTensorKeyDictionary()


def _state() -> _State:
    if call_state.copies is None:
        call_state.copies = _State()
    state: _State = call_state.copies
    return state


def rounded(factor: Tensor) -> Tensor:
    """Return an fp32 factor of a product in bf16. If the graph keeps the factor, it keeps this copy instead."""
    narrow = factor.bfloat16()
    state = _state()
    for place, kept in enumerate(state.factors):
        if factor is kept:
            state.copies[place] = narrow
    return narrow


def rounded_once(factor: Tensor) -> Tensor:
    """Return a factor for a product that rounds while packing: in bf16 only if the graph keeps it and has no copy."""
    state = _state()
    for place, kept in enumerate(state.factors):
        if factor is kept:
            known = _copy_of(factor)
            if known is None:
                return rounded(factor)
            state.copies[place] = known
    return factor


def widened(narrow: Tensor) -> Tensor:
    """Return a bf16 result of a product in fp32. The graph of a batch norm that reads it keeps the bf16 values."""
    wide = narrow.float()
    state = _state()
    if state.factors:
        state.result = wide, narrow
    return wide


def discard_copies(tensor: Tensor) -> None:
    """Round a tensor anew for each product from now on, because the program may write to it without a new version."""
    memory = base_of(tensor)
    if memory.grad_fn is not None:  # only tensors of a graph have copies
        state = _state()
        state.kept[memory] = _NONE
        state.last.pop(memory, None)


def keeping(operator: str, names: Mapping[int, str], backward: str, only_for: int | None = None) -> Override:
    """Return an override of a product that keeps factors in bf16 if it rounds them.

    The keys of `names` are the positions of factors in the arguments. The values are the attributes of the product's
    node that have these factors, without ``_saved_``. `backward` is the operator that its backward calls, whose
    override has `reads_copies`. `only_for` is the position of the tensor without whose gradient the node has no
    factors, if there is one.
    """
    places = tuple(names)

    def compute(call: Call) -> Any:
        arguments, named = call.details
        assert call.kernel is not None
        with _recorded(call.tensors) as recorded:
            outs = call.kernel(*arguments, **named)
            copies, result = recorded.copies, recorded.result
        out = outs[0] if isinstance(outs, (tuple, list)) else outs
        if out.grad_fn is not None:
            for place, copy in copies.items():
                _keep_factor(out.grad_fn, names[places[place]], backward, call.tensors[place], copy)
        last = _state().last
        last.clear()
        if result is not None and result[0] is out:
            last[out] = _Copy(version(out), lambda: result[1])
        return outs

    def supports(kernel: Kernel, *args: Any, **named: Any) -> Call | None:
        factors = tuple(args[place] for place in places)
        if not all(map(_is_kept, factors)) or not (only_for is None or args[only_for].requires_grad):
            return None
        return Call(operator, factors, kernel=kernel, details=(args, named))

    return _on_autograd(operator, compute, supports)


def keeping_result(operator: str, name: str, backward: str, reads: Callable[..., bool]) -> Override:
    """Return an override that keeps its first tensor in bf16 if that is a rounded product the backward `reads` so."""

    def compute(call: Call) -> Any:
        assert call.kernel is not None
        outs = call.kernel(*call.details)
        node, narrow = outs[0].grad_fn, _copy_in(_state().last, call.tensors[0])
        if node is not None and narrow is not None:
            replace_saved(node, name, narrow, partial(_unpacked, backward))
        return outs

    def supports(kernel: Kernel, *args: Any) -> Call | None:
        x = args[0]
        if not _is_kept(x) or _copy_in(_state().last, x) is None or not reads(*args):
            return None
        return Call(operator, (x,), kernel=kernel, details=args)

    return _on_autograd(operator, compute, supports)


def _on_autograd(operator: str, compute: Callable[[Call], Any], supports: Callable[..., Call | None]) -> Override:
    algorithm = Algorithm("bf16 copies", compute, FP32, is_raced=False)
    return Override(operator, (algorithm,), supports, dispatch_key="AutogradCPU")


def _is_kept(x: Tensor) -> bool:
    """Whether a copy may replace a large tensor that a graph keeps, and that the program will drop: not a leaf."""
    if x.dtype is not torch.float32 or x.numel() < MIN_ELEMENTS or x.grad_fn is None or not torch.is_grad_enabled():
        return False
    if _is_needed_by_its_node(x):
        return False
    return is_plain(x, FP32) and computes_now() and not in_forward_mode() and not has_saved_tensor_hooks()


@contextmanager
def _recorded(factors: tuple[Tensor, ...]) -> Iterator[_State]:
    state = _state()
    state.factors = factors
    try:
        yield state
    finally:
        state.factors, state.copies, state.result = (), {}, None


def _memory_of(tensor: Tensor) -> Tensor | None:
    """Return the dense tensor that a tensor is or shows in full, or None."""
    if not is_dense(tensor):
        return None
    base = base_of(tensor)
    return base if base.numel() == tensor.numel() and base.dtype is tensor.dtype and is_dense(base) else None


def _copy_in(copies: Any, tensor: Tensor) -> Tensor | None:
    known = copies.get(tensor)
    return None if known is None or known.version != version(tensor) else known.values()


def _copy_of(factor: Tensor) -> Tensor | None:
    """Return the copy of a factor that a graph keeps already, with the factor's strides."""
    memory = _memory_of(factor)
    known = None if memory is None else _copy_in(_state().kept, memory)
    return None if known is None else _laid_out_as(factor, known)


def _laid_out_as(tensor: Tensor, copy: Tensor) -> Tensor:
    """Return a copy of a dense tensor with the shape and strides of another one that shows the same memory."""
    return copy if lies_as(copy, tensor) else copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset())


def _keep_factor(node: Any, name: str, backward: str, factor: Tensor, copy: Tensor) -> None:
    known = _copy_of(factor)
    if known is None:  # otherwise another product has kept the same factor
        known, memory = copy, _memory_of(factor)
        if memory is not None and _state().kept.get(memory) is not _NONE:
            _state().kept[memory] = _Copy(version(memory), TensorWeakRef(copy))
            _keep_output(memory, copy)
    replace_saved(node, name, known, partial(_unpacked, backward))


#: The nodes that keep their output, by name: the attribute that has it, and the operator that reads it.
_KEEP_OUTPUT = {
    "ReluBackward0": ("result", "threshold_backward"),
    "ScaledDotProductFlashAttentionForCpuBackward0": ("output", f"{FLASH_KERNEL}_backward"),
}


def _is_needed_by_its_node(tensor: Tensor) -> bool:
    """Whether the node that computed a tensor keeps it in fp32, as that of tanh: a copy would take more memory."""
    node: Any = base_of(tensor).grad_fn
    return node is not None and node.name() not in _KEEP_OUTPUT and saves_output(node)


def _keep_output(tensor: Tensor, copy: Tensor) -> None:
    """Let the node that has computed a tensor keep the copy, too, unless the tensor was written to since then."""
    node: Any = tensor.grad_fn
    kept = None if node is None else _KEEP_OUTPUT.get(node.name())
    if kept is None:
        return
    name, backward = kept
    output = saved_output(node, name)
    if output is None or output.dtype is not torch.float32:
        return
    if output.data_ptr() == tensor.data_ptr() and lies_as(output, tensor):
        with suppress(RuntimeError):  # packed by hooks, in a version of torch that does not say so
            replace_saved(node, name, _laid_out_as(tensor, copy), partial(_unpacked, backward))


def _unpacked(backward: str, narrow: Tensor) -> Tensor:
    """Return a copy for the operator that reads it, or its values in fp32."""
    is_read = users((backward, "CPU")) > 0 and not torch.is_grad_enabled()
    return narrow if is_read and computes_now() and not in_forward_mode() else narrow.float()
