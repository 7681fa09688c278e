"""The last layer over a vocabulary: computes logits of rows, and adds gradients of rows.

A large linear layer called in a set-up model returns `nano_loop.kernels.head.logits.LazyLogits`. Before an optimizer's
step changes the weight of logits that still exist, the smaller of logits and old weight is kept.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nano_loop.errors import error_message
from nano_loop.kernels.memory import empty
from nano_loop.patching.optimizers import called_before_steps
from nano_loop.patching.ownership import Rules, by_rules
from nano_loop.patching.patch_table import shared_change, value_in_force
from nano_loop.patching.torch_private import base_of, below_autocast, version
from nano_loop.patching.user_code import users_place

#: Bytes of the logits computed at a time, and minimum number of rows: the weight's gradient is read and written
#: once for each chunk of rows.
CHUNK_BYTES, FEWEST_ROWS = 1 << 28, 384
#: Number of rows of the weight's gradient that are added at a time if the product needs a tensor of its own.
_BLOCK = 1 << 13

_NOTED = "noted heads"


class _Noted:
    """What runs note about heads.

    `heads` has weak references to heads whose logits may still be read, by id. `whole` has lines of the program that
    have read all logits. `shapes` tells whether a layer's logits have been read in chunks, by the owner of the layer's
    rules and the weight's shape. `gradients` are those computed in a forward pass whose backward pass is to come.
    """

    def __init__(self) -> None:
        self.heads: dict[int, weakref.ref[Head]] = {}
        self.whole: set[str] = set()
        self.shapes: dict[tuple[int, torch.Size], bool] = {}
        self.gradients: weakref.WeakSet[Gradients] = weakref.WeakSet()


def noted() -> _Noted:
    """Return the notes of the runs of this process. Outside runs, the notes are discarded."""
    return value_in_force(_NOTED) or _Noted()


class Memory:
    """The values of a lazy tensor that is not a view, once computed. Its detached twins share them."""

    tensor: Tensor | None = None
    version = 0

    def set(self, tensor: Tensor) -> None:
        """Set the values."""
        self.tensor, self.version = tensor, version(tensor)

    @property
    def is_written(self) -> bool:
        """Whether the values have been written to."""
        return self.tensor is not None and version(self.tensor) != self.version


class Head:
    """The inputs of one call of a head, from which logits are computed. They keep their values at the time of the call.

    The input `hidden` is of shape (..., D). Each row gives one row of logits. The weight is of shape (V, D), and the
    bias of shape (V,). The attributes of these names are detached from the graph, and `hidden` is then of shape (N, D).
    `shape` is the shape of the input. `rules` are the rules of the call. `memory` has all logits, once they have been
    computed.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rules: Rules) -> None:
        self.shape = hidden.shape
        hidden = hidden.detach().reshape(-1, hidden.size(-1))
        self.hidden = hidden.clone() if hidden.is_inference() else hidden  # writes to such a tensor go unnoticed
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.rules = rules
        self.memory = Memory()
        self._is_old = False
        self._versions = self._versions_now()
        tensors = [item for item in (weight, bias) if item is not None]
        # Those that steps change, unless they are frozen by then.
        self._parameters = tensors if all(isinstance(item, nn.Parameter) for item in tensors) else []
        self._is_computed = weight.grad_fn is not None and base_of(weight) is weight  # such as a cast by autocast
        self._is_kept = False
        key, heads = id(self), noted().heads
        heads[key] = weakref.ref(self, lambda _: heads.pop(key, None))

    @property
    def layer(self) -> tuple[int, torch.Size]:
        """The owner of the rules, and the weight's shape."""
        return self.rules.owner, self.weight.shape

    @property
    def width(self) -> int:
        """The size of the vocabulary."""
        return self.weight.size(0)

    @property
    def chunk(self) -> int:
        """Number of rows that are computed at a time."""
        return max(CHUNK_BYTES // self.weight.itemsize // self.width, FEWEST_ROWS)

    @property
    def _is_left_by_steps(self) -> bool:
        """Whether steps of optimizers change neither the weight nor the bias."""
        is_frozen = bool(self._parameters) and not any(item.requires_grad for item in self._parameters)
        return self._is_computed or is_frozen

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(version(tensor) for tensor in (self.hidden, self.weight, self.bias) if tensor is not None)

    def logits(self, rows: slice | Tensor) -> Tensor:
        """Return the logits of some rows, of shape (R, V), in new memory."""
        if self._is_old and self.memory.tensor is not None and not self.memory.is_written:
            return self.memory.tensor.view(-1, self.width)[rows].clone()
        if self._is_old or self._versions_now() != self._versions:
            got = "logits were read after the input, the weight or the bias of their layer was written to"
            allowed = "they are computed when they are read, and kept only before a step of an optimizer"
            raise RuntimeError(error_message(got, allowed, "Read logits before, or pass fast_cross_entropy=False"))
        hidden = self.hidden[rows]
        with torch.no_grad(), below_autocast(), by_rules(self.rules):
            if self.bias is None:
                return torch.ops.aten.mm(hidden, self.weight.t())  # type: ignore[no-any-return]
            return torch.ops.aten.addmm(self.bias, hidden, self.weight.t())  # type: ignore[no-any-return]

    def all_logits(self, rows: Tensor) -> Tensor:
        """Return the logits of all rows, in the shape of `rows` with the vocabulary appended."""
        return self._whole().view(*rows.shape, self.width)

    def _whole(self) -> Tensor:
        """Return all logits. They are computed by the same products as in chunks, so that the bits are the same."""
        chunks = range(0, len(self.hidden), self.chunk)
        if len(chunks) <= 1:
            return self.logits(slice(None))
        whole = empty(len(self.hidden), self.width, dtype=self.weight.dtype)
        for start in chunks:
            whole[start : start + self.chunk] = self.logits(slice(start, start + self.chunk))
        return whole

    def keep(self, copies: dict[int, Tensor], by_step: bool = True) -> None:
        """Keep the smaller of logits and old weight.

        `copies` are copies of weights and biases by address, shared between heads. `by_step` is whether the next write
        is a step of an optimizer.
        """
        if self._is_kept or (by_step and self._is_left_by_steps):
            return
        self._is_kept = True
        if self._versions_now() != self._versions:  # already written to: reading the logits raises an error
            return
        if self.memory.tensor is None and len(self.hidden) <= self.weight.size(1):
            self.memory.set(self._whole().view(*self.shape[:-1], self.width))
        if self.memory.tensor is not None:
            self._is_old = True
            return
        self.weight = _copy(self.weight, copies)
        self.bias = None if self.bias is None else _copy(self.bias, copies)
        self._versions = self._versions_now()

    def keep_what_is_in(self, storage: torch.UntypedStorage, copies: dict[int, Tensor]) -> None:
        """Keep the values from which the logits are computed if they are in a storage that may be written to next."""
        if any(item is not None and item.untyped_storage() is storage for item in (self.weight, self.bias)):
            self.keep(copies, by_step=False)
        if self.hidden.untyped_storage() is storage and self._versions_now() == self._versions:
            self.hidden = self.hidden.clone()
            self._versions = self._versions_now()


def remark() -> str | None:
    """Return the report's remark about code that reads all logits."""
    whole = sorted(noted().whole)
    return f"{', '.join(whole)} read all logits" if whole else None


def may_be_head(rules: Rules, weight: Tensor) -> bool:
    """Whether a layer may be a head. It may not if all of its first output in training was read, as inside a model."""
    return noted().shapes.get((rules.owner, weight.shape), True)


def note_chunked(head: Head) -> None:
    """Note that logits are read in chunks."""
    noted().shapes[head.layer] = True


def note_whole(head: Head, has_gradient: bool) -> None:
    """Note the line of the program that reads all logits."""
    if has_gradient:
        noted().shapes.setdefault(head.layer, False)
    place = users_place()
    if place is not None:
        noted().whole.add(f"{os.path.basename(place.filename)}:{place.number}")


def _copy(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """Return a copy of a tensor: an existing one with this address, or else a new one, which is added to `copies`."""
    address = tensor.data_ptr()
    if address not in copies:
        copies[address] = tensor.clone()
        copies[copies[address].data_ptr()] = copies[address]  # never written to
    return copies[address]


def _keep_all(notes: _Noted) -> None:
    """Keep the values from which all logits that may still be read are computed."""
    weights: dict[int, Tensor] = {}
    for reference in [*notes.heads.values()]:
        if (head := reference()) is not None:
            head.keep(weights)


def keep_logits_of(tensor: Tensor) -> None:
    """Keep values of logits that are in a tensor's memory, because the program may write to it."""
    copies: dict[int, Tensor] = {}
    for reference in [*noted().heads.values()]:
        if (head := reference()) is not None:
            head.keep_what_is_in(tensor.untyped_storage(), copies)


@contextmanager
def _kept() -> Iterator[_Noted]:
    notes = _Noted()
    try:
        with called_before_steps(lambda *_: _keep_all(notes)):
            yield notes
    finally:
        _keep_all(notes)


def logits_kept() -> Any:
    """Return a context in which optimizer steps do not change the values of logits, and neither does its end."""
    return shared_change(_NOTED, _kept)


class Gradients:
    """The gradients of a head's input, weight and bias, as it `needs`, to which those of rows of logits are added."""

    @classmethod
    def in_forward(cls, head: Head, needs: tuple[bool, bool, bool], rows: int) -> Gradients | None:
        """Return gradients to be computed with a loss of some rows and held until its backward pass, or None.

        Those of a single loss are as large as gradients that its backward pass returns anyway. A program that adds up
        the losses of many parts of a batch would hold as many. Further ones must be no larger than the rows' logits,
        which torch holds.
        """
        size = head.hidden.numel() * needs[0] + head.weight.numel() * needs[1]
        held = noted().gradients
        if size > rows * head.width and any(other.layer == head.layer for other in held):
            return None
        gradients = cls(head, needs, rows)
        held.add(gradients)
        return gradients

    def __init__(self, head: Head, needs: tuple[bool, bool, bool], rows: int) -> None:
        hidden, self._needs_weight, bias = needs
        self.layer = head.layer
        self._head = head
        # In fp32 without a policy, products are added in place.
        self._adds = head.rules.policy is None and head.weight.dtype is torch.float32
        self._may_be_one = rows <= head.chunk  # whether the first product is expected to be the whole gradient
        self._hidden = torch.zeros_like(head.hidden) if hidden else None
        self._weight: Tensor | None = None  # in the product's dtype if there was one, otherwise in fp32
        self._bias = empty(head.width).zero_() if bias else None

    def add(self, rows: slice | Tensor, gradient: Tensor) -> None:
        """Add the gradient for logits of some rows, of shape (R, V)."""
        head = self._head
        with torch.no_grad(), below_autocast(), by_rules(head.rules):
            if self._hidden is not None:
                part = torch.ops.aten.mm(gradient, head.weight)
                if isinstance(rows, slice):
                    self._hidden[rows] += part
                else:
                    self._hidden.index_add_(0, rows, part)
            if self._needs_weight:
                self._add_to_weight(head.hidden[rows], gradient)
            if self._bias is not None:
                self._bias += gradient.sum(0)  # of bf16 with sums in fp32; dtype=torch.float32 would copy the gradient

    def _add_to_weight(self, hidden: Tensor, gradient: Tensor) -> None:
        is_first = self._weight is None
        if is_first and (self._adds or self._may_be_one):
            self._weight = torch.ops.aten.mm(gradient.t(), hidden)
            return
        weight = self._weight = empty(*self._head.weight.shape) if self._weight is None else self._weight.float()
        if self._adds:
            weight.addmm_(gradient.t(), hidden)
            return
        for start in range(0, len(weight), _BLOCK):
            part = torch.ops.aten.mm(gradient[:, start : start + _BLOCK].t(), hidden)
            block = weight[start : start + _BLOCK]
            if is_first:
                block.copy_(part)
            else:
                block.add_(part)

    def scaled(self, factor: Tensor | None) -> list[Tensor | None]:
        """Return the three gradients times a number, or None for those not needed. Can be called only once."""
        if self._needs_weight and self._weight is None:
            self._weight = torch.zeros_like(self._head.weight)
        hidden = None if self._hidden is None else self._hidden.view(self._head.shape)
        results = (hidden, self._weight, self._bias)
        if factor is not None and factor.item() != 1:
            for gradient in results:
                if gradient is not None:
                    gradient.mul_(factor)
        of = (self._head.hidden, self._head.weight, self._head.bias)
        pairs = zip(results, of, strict=True)
        return [None if gradient is None or like is None else gradient.to(like.dtype) for gradient, like in pairs]
