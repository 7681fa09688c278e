"""Draws random tensors as the plain loop does: in its order, and for whole batches.

torch fills a tensor in memory order. With `channels_last`, dropout after a convolution would thus draw different masks
than in the plain loop, and `torch.randn_like` different noise. Here a contiguous tensor is filled and copied. If ranks
share each batch, `nano_loop.distributed.data_parallel.random_draws` fills a tensor for the whole batch.

NCHW order only applies to layouts that `channels_last` created: a tensor that the model itself permutes is NHWC in the
plain loop, too. In the autograd graph, convolutions are marked; the nearest one or permutation decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.memory import NHWC
from nano_loop.patching.operators import Kernel, gives_kernels, overridden
from nano_loop.patching.ownership import rules_now
from nano_loop.patching.patch_table import shared_change, value_in_force
from nano_loop.patching.torch_private_autograd import in_backward

#: The operators that fill a tensor, except ``bernoulli_.float``, which `nano_loop.kernels.bernoulli` replaces.
_FILLING = ("uniform_", "normal_", "exponential_")
#: The key of the mark in a node's metadata.
_MARK = "nano_loop: NHWC by channels_last"
_PERMUTATIONS = frozenset(("PermuteBackward0", "TransposeBackward0"))
_MOST_NODES, _MOST_DRAWS = 256, 1 << 16


class _Call(threading.local):
    """The model call that this thread is in."""

    is_converted: bool | None = None  # whether `channels_last` converts the model; None: unknown, as in compiled code
    #: Whether the most recently converted tensor has no node to mark. It decides if there is no graph.
    is_unmarked = False
    #: The address of the latest `empty_like` of an NHWC tensor, and whether that is NHWC due to `channels_last`.
    latest = (0, False)
    is_mask: bool | None = None  # the `is_mask` that `drawn` should use; None: the argument passed to it


_call = _Call()


@contextmanager
def drawn_as_nchw() -> Iterator[None]:
    """Draw values, before torch 2.9 masks only, in NCHW order for tensors that `channels_last` made NHWC."""
    with ExitStack() as stack:
        stack.enter_context(shared_change(drawn_as_nchw, lambda: nullcontext({})))
        if gives_kernels():
            stack.enter_context(overridden("empty_like", _noting, "CPU"))
            for operator in _FILLING:
                stack.enter_context(in_order(operator))
        yield


@contextmanager
def in_call(is_converted: bool) -> Iterator[None]:
    """Surround an outermost call into a model; `is_converted` tells whether `channels_last` converts it."""
    before = _call.is_converted, _call.is_unmarked
    _call.is_converted, _call.is_unmarked = is_converted, False
    try:
        yield
    finally:
        _call.is_converted, _call.is_unmarked = before


def mark(tensor: Tensor, is_converted: bool) -> None:
    """Record whether an input, or the output of a convolution, is NHWC only because of `channels_last`."""
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_MARK] = is_converted
    _call.is_unmarked = is_converted and node is None


def is_converted(tensor: Tensor) -> bool:
    """Whether a tensor in NHWC would not be NHWC in the plain loop."""
    nodes: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if _MARK in node.metadata:
            return bool(node.metadata[_MARK])
        if node.name() in _PERMUTATIONS:
            return False
        seen.add(node)
        nodes += [before for before, _ in reversed(node.next_functions)]  # a sum has the layout of its first term
    return _call.is_unmarked


def is_drawn_as_nchw(tensor: Tensor, generator: torch.Generator | None = None) -> bool:
    """Whether a tensor is NHWC because of nano_loop, so that the plain loop draws it in another order."""
    if tensor.dim() not in NHWC or tensor.is_contiguous():
        return False
    # Keyed by generator state: a checkpoint redraws from the same state, when less of the graph may be visible.
    orders: dict[int, bool] | None = value_in_force(drawn_as_nchw)
    if orders is None:
        return False
    if not tensor.is_contiguous(memory_format=NHWC[tensor.dim()]) or rules_now() is None:
        return False
    state = hash((generator or torch.default_generator).get_state().numpy().tobytes())
    if in_backward():
        return orders.get(state, True)
    if len(orders) >= _MOST_DRAWS:
        orders.clear()
    as_nchw = orders[state] = _is_made_by_us(tensor)
    return as_nchw


def _is_made_by_us(tensor: Tensor) -> bool:
    if not _call.is_converted or not gives_kernels():
        return _call.is_converted is not False
    address, answer = _call.latest
    return answer if address == tensor.data_ptr() else is_converted(tensor)


def drawn(
    tensor: Tensor, generator: torch.Generator | None, fill: Callable[[Tensor], Tensor], *, is_mask: bool = False
) -> Tensor:
    """Fill a tensor as the plain loop does and return it.

    Functions that are `listening` to this one are called first. They return the filled tensor, or None.

    `fill` fills a tensor in memory order and returns it. If `generator` is None, random numbers are from torch's
    default generator. `is_mask` is whether the values are a mask or noise, rather than an initial parameter.
    """
    if is_drawn_as_nchw(tensor, generator):
        return tensor.copy_(drawn(contiguous_like(tensor), generator, fill, is_mask=is_mask))
    is_mask = is_mask if _call.is_mask is None else _call.is_mask
    for draw in value_in_force(drawn) or ():
        filled: Tensor | None = draw(tensor, generator, fill, is_mask)
        if filled is not None:
            return filled
    return fill(tensor)


@contextmanager
def treated_as_masks(are_masks: bool) -> Iterator[None]:
    """Treat the tensors that the body draws as masks, or not as masks, whatever `drawn` is told."""
    before, _call.is_mask = _call.is_mask, are_masks
    try:
        yield
    finally:
        _call.is_mask = before


def contiguous_like(tensor: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor with the shape and dtype of another."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _noting(original: Kernel | None) -> Callable[..., Tensor]:
    """Record the tensor passed to ``empty_like``, which dropouts and ``randn_like`` call before filling."""
    if original is None:
        raise TypeError("torch does not return the kernel to call")

    def empty_like(keys: torch.DispatchKeySet, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = original(keys, tensor, *args, **kwargs)
        if _call.is_converted and tensor.dim() in NHWC and not made.is_contiguous():
            _call.latest = made.data_ptr(), is_converted(tensor)
        return made

    return empty_like


def in_order(operator: str) -> AbstractContextManager[None]:
    """Return a context in which a filling operator uses `drawn`. Requires that torch `gives_kernels`."""
    is_mask = operator == "exponential_"  # used for the Gumbel distribution

    def make(original: Kernel | None) -> Callable[..., Tensor]:
        if original is None:
            raise TypeError("torch does not return the kernel to call")

        def fill(keys: torch.DispatchKeySet, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            generator = kwargs.get("generator")
            return drawn(tensor, generator, lambda plain: original(keys, plain, *args, **kwargs), is_mask=is_mask)

        return fill

    return overridden(operator, make, "CPU")
