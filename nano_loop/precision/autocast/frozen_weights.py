"""Frozen weights under autocast: the rounded copy that a graph would hold is made once instead of in every call.

An example are the weights beside an adapter. A weight gets a copy only after torch's cast of it was saved for the
backward, so that the peak memory of a step does not grow: not if an activation checkpoint drops the cast, and not in an
evaluation. Later calls of the model use the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nano_loop.kernels.narrow_weight import NarrowWeight
from nano_loop.patching.members import has_shape, parameters_of
from nano_loop.patching.operators import ruled
from nano_loop.patching.ownership import OperatorRule
from nano_loop.patching.patch_table import shared_change
from nano_loop.patching.torch_private import has_saved_tensor_hooks, in_dispatch_mode, in_functorch
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.patching.weight_copies import WeightCopies, takes_mark
from nano_loop.precision.autocast.default_ops import as_torch_does

#: Operators of layers that autocast runs in its own dtype.
OPERATORS = frozenset(("linear", "addmm", "mm", "matmul", "conv1d", "conv2d", "conv3d"))
#: Minimum number of elements of a weight. Casting a smaller one is as fast as looking up its copy.
FEWEST = 1 << 14


def is_frozen(weight: object) -> bool:
    """Whether this is a weight that autocast casts, that is not trained, and that is large enough for a copy."""
    return (
        type(weight) is nn.Parameter
        and not weight.requires_grad
        and weight.dtype is torch.float32
        and weight.is_cpu
        and weight.layout is torch.strided
        and has_shape(weight)
        and weight.numel() >= FEWEST
        and not weight.is_inference()
    )


def remark_on_frozen(model: nn.Module) -> str | None:
    """Return the report line about the frozen weights of a model, or None if none may have copies."""
    frozen = [*filter(is_frozen, parameters_of(model))]
    may_copy = any(map(takes_mark, frozen)) or any(isinstance(weight, NarrowWeight) for weight in parameters_of(model))
    return f"frozen weights of {type(model).__name__} rounded once" if may_copy else None


def remark_on_integers(model: nn.Module) -> str | None:
    """Return the report line about integer weights, as of layers in 4 or 8 bits, or None."""
    dtypes = {weight.dtype for weight in parameters_of(model)}
    integers = (dtype for dtype in dtypes if not (dtype.is_floating_point or dtype.is_complex))
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in integers))
    return f"weights of {type(model).__name__} in {names} unchanged" if names else None


class RoundedOnce:
    """The copies of frozen weights in autocast's dtype, and the rules by which layers use them, by operator."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copies = WeightCopies(lambda weight: weight.to(dtype))
        self._wanted: set[int] = set()  # ids of weights
        self.rules: dict[str, OperatorRule] = dict.fromkeys(OPERATORS, self._rule)

    def prepare(self, model: nn.Module) -> None:
        """Make the copies that were missing in the last call of a model."""
        if self._wanted:
            wanted, self._wanted = self._wanted, set()
            for weight in parameters_of(model):
                if id(weight) in wanted and is_frozen(weight) and self._copies.find(weight) is None:
                    self._copies.make(weight)

    @contextmanager
    def in_force(self) -> Iterator[RoundedOnce]:
        """Keep copies, and activate the rules for layers, until the end of the body."""
        with self._copies.kept(), ruled(OPERATORS, as_torch_does):
            yield self

    def _rule(self, function: Any, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # `disable_casts` sets another dtype. A dispatch mode may be one without data, such as fake tensors.
        if torch.get_autocast_dtype("cpu") is self._dtype and not in_dispatch_mode() and not in_functorch():
            args = tuple(self._rounded(arg, args) if type(arg) in (nn.Parameter, NarrowWeight) else arg for arg in args)
        return function(keys, *args, **kwargs)

    def _rounded(self, weight: Tensor, args: tuple[Any, ...]) -> Tensor:
        if isinstance(weight, NarrowWeight):
            narrow = weight.narrow_numbers() if self._dtype is torch.bfloat16 else None
            return weight if narrow is None else narrow
        if not is_frozen(weight):
            self._copies.forget(id(weight))
            return weight
        copy = self._copies.find(weight)
        if copy is None and _would_be_kept(args):
            self._wanted.add(id(weight))
        return weight if copy is None else copy


def rounded_once(dtype: torch.dtype) -> AbstractContextManager[RoundedOnce]:
    """Return a context, shared by all runs, in which frozen weights are rounded once."""
    return shared_change(("frozen weights", dtype), lambda: RoundedOnce(dtype).in_force())


def _would_be_kept(args: tuple[Any, ...]) -> bool:
    """Whether torch would save the cast of a weight for the backward, to compute the gradient of an input."""
    has_input = any(isinstance(arg, Tensor) and arg.requires_grad and type(arg) is not nn.Parameter for arg in args)
    return has_input and torch.is_grad_enabled() and not has_saved_tensor_hooks() and not in_backward()
