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

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nano_loop.kernels.memory import computes_now, is_plain
from nano_loop.kernels.override import FP32, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.patching.optimizers import lies_as
from nano_loop.patching.patch_table import users
from nano_loop.patching.torch_private import has_saved_tensor_hooks, version
from nano_loop.patching.torch_private_autograd import in_forward_mode

#: Minimum number of elements of a tensor. Below it, the memory is not worth the Python overhead.
MIN_ELEMENTS = 1 << 18


class _Copy(NamedTuple):
    """The bf16 copy of a tensor at a version. `values` returns it, or None if it was freed."""

    version: int
    values: Callable[[], Tensor | None]


class _Call(threading.local):
    """The call of a product in this thread.

    Attributes
    ----------
    factor : torch.Tensor or None
        The factor that its graph keeps. None outside of such a call.
    copy : torch.Tensor or None
        This factor in bf16, if the product has rounded it.
    result : tuple of torch.Tensor or None
        Its result in fp32 and, with the same values, in bf16.
    """

    factor: Tensor | None = None
    copy: Tensor | None = None
    result: tuple[Tensor, Tensor] | None = None


_call = _Call()
#: The copies of factors, which live as long as a graph keeps them.
_factors: Any = WeakTensorKeyDictionary()
#: The bf16 values of the last product's result, until the result is freed or another product is computed: the operator
#: that reads the result is not known yet.
_result: Any = WeakTensorKeyDictionary()


def rounded(factor: Tensor) -> Tensor:
    """Return an fp32 factor of a product in bf16. If the graph keeps the factor, it keeps this copy instead."""
    narrow = factor.bfloat16()
    if factor is _call.factor:
        _call.copy = narrow
    return narrow


def widened(narrow: Tensor) -> Tensor:
    """Return a bf16 result of a product in fp32. The graph of a batch norm that reads it keeps the bf16 values."""
    wide = narrow.float()
    if _call.factor is not None:
        _call.result = wide, narrow
    return wide


def keeping(operator: str, name: str, backward: str) -> Override:
    """Return an override of a product that keeps its first factor in bf16 if it rounds it.

    Parameters
    ----------
    operator : str
        The product.
    name : str
        The attribute of its node that has the factor, without ``_saved_``.
    backward : str
        The operator that its backward calls, whose override has `reads_copies`.
    """

    def compute(call: Call) -> Tensor:
        assert call.kernel is not None
        with _recorded(call.tensors[0]) as recorded:
            out: Tensor = call.kernel(*call.details)
            copy, result = recorded.copy, recorded.result
        if copy is not None and out.grad_fn is not None:
            _keep_factor(out.grad_fn, name, backward, call.tensors[0], copy)
        _result.clear()
        if result is not None and result[0] is out:
            _result[out] = _Copy(version(out), lambda: result[1])
        return out

    def supports(kernel: Kernel, factor: Tensor, *args: Any) -> Call | None:
        return Call(operator, (factor,), kernel=kernel, details=(factor, *args)) if _is_kept(factor) else None

    return _on_autograd(operator, compute, supports)


def keeping_result(operator: str, name: str, backward: str, reads: Callable[..., bool]) -> Override:
    """Return an override of an operator that keeps its first tensor in bf16 if it is the rounded result of a product.

    `reads` accepts the arguments of the operator, and returns whether its backward reads the tensor and the override of
    `backward` supports it. See `keeping`.
    """

    def compute(call: Call) -> Any:
        assert call.kernel is not None
        outs = call.kernel(*call.details)
        node, narrow = outs[0].grad_fn, _copy_in(_result, call.tensors[0])
        if node is not None and narrow is not None:
            _pack(node, name, backward, narrow)
        return outs

    def supports(kernel: Kernel, *args: Any) -> Call | None:
        x = args[0]
        if not _is_kept(x) or _copy_in(_result, x) is None or not reads(*args):
            return None
        return Call(operator, (x,), kernel=kernel, details=args)

    return _on_autograd(operator, compute, supports)


def _on_autograd(
    operator: str, compute: Callable[[Call], Any], supports: Callable[..., Call | None]
) -> Override:
    algorithm = Algorithm("bf16 copies", compute, FP32, is_raced=False)
    return Override(operator, (algorithm,), supports, dispatch_key="AutogradCPU")


def _is_kept(x: Tensor) -> bool:
    """Whether a copy may replace a large tensor that a graph keeps."""
    if x.dtype is not torch.float32 or x.numel() < MIN_ELEMENTS or not torch.is_grad_enabled():
        return False
    return is_plain(x, FP32) and computes_now() and not in_forward_mode() and not has_saved_tensor_hooks()


@contextmanager
def _recorded(factor: Tensor) -> Iterator[_Call]:
    _call.factor = factor
    try:
        yield _call
    finally:
        _call.factor = _call.copy = _call.result = None


def _copy_in(copies: Any, tensor: Tensor) -> Tensor | None:
    known = copies.get(tensor)
    return None if known is None or known.version != version(tensor) else known.values()


def _keep_factor(node: Any, name: str, backward: str, factor: Tensor, copy: Tensor) -> None:
    known = _copy_in(_factors, factor)
    if known is None:  # otherwise another product has kept the same factor
        known = copy
        _factors[factor] = _Copy(version(factor), weakref.ref(copy))
        _keep_output(factor, copy)
    _pack(node, name, backward, known)


#: The nodes that keep their output, by name: the attribute that has it, and the operator that reads it.
_KEEP_OUTPUT = {"ReluBackward0": ("result", "threshold_backward")}


def _keep_output(tensor: Tensor, copy: Tensor) -> None:
    """Let the node that has computed a tensor keep the copy, too."""
    node: Any = tensor.grad_fn
    kept = None if node is None else _KEEP_OUTPUT.get(node.name())
    if kept is None:
        return
    name, backward = kept
    try:
        output: Tensor = getattr(node, f"_saved_{name}")
    except RuntimeError:  # it was written to since then, which the backward reports
        return
    if output.data_ptr() == tensor.data_ptr() and output.dtype is torch.float32 and lies_as(output, tensor):
        _pack(node, name, backward, copy)


def _pack(node: Any, name: str, backward: str, narrow: Tensor) -> None:
    getattr(node, f"_raw_saved_{name}").register_hooks(lambda _: narrow, partial(_unpacked, backward))


def _unpacked(backward: str, narrow: Tensor) -> Tensor:
    """Return a copy for the operator that reads it, or its values in fp32."""
    is_read = users((backward, "CPU")) > 0 and not torch.is_grad_enabled()
    return narrow if is_read and computes_now() and not in_forward_mode() else narrow.float()
