"""Frozen weights under autocast: the rounded copy that a graph would hold is made once, and not in every call.

As for the weights beside an adapter. A weight gets a copy once torch's cast of it has lived until the backward, so that
the peak of a step stays what it is; not where an activation checkpoint drops the cast, nor in an evaluation. From the
next call of the model on, each takes the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nano_loop.kernels.narrow_weight import NarrowWeight
from nano_loop.patching.members import parameters_of
from nano_loop.patching.operators.operators import ruled
from nano_loop.patching.ownership import OperatorRule
from nano_loop.patching.patch_table import shared_change
from nano_loop.patching.torch_private import has_saved_tensor_hooks, in_dispatch_mode, in_functorch
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.patching.weight_copies import WeightCopies, takes_mark
from nano_loop.precision.autocast.default_ops import as_torch_does

#: Operators of layers that autocast runs in its dtype.
OPERATORS = frozenset(("linear", "addmm", "mm", "matmul", "conv1d", "conv2d", "conv3d"))
#: Minimum number of elements of a weight. Smaller ones are cast as fast as a copy is found.
FEWEST = 1 << 14


def is_frozen(weight: object) -> bool:
    """Whether this is a weight that autocast casts, which nobody trains, and which is large enough for a copy."""
    return (
        type(weight) is nn.Parameter
        and not weight.requires_grad
        and weight.dtype is torch.float32
        and weight.is_cpu
        and weight.layout is torch.strided
        and weight.numel() >= FEWEST
        and not weight.is_inference()
    )


def remark_on_frozen(model: nn.Module) -> str | None:
    """Return what the report says of the frozen weights of a model, if some may have copies."""
    frozen = [*filter(is_frozen, parameters_of(model))]
    may_copy = any(map(takes_mark, frozen)) or any(isinstance(weight, NarrowWeight) for weight in parameters_of(model))
    return f"frozen weights of {type(model).__name__} rounded once" if may_copy else None


def remark_on_integers(model: nn.Module) -> str | None:
    """Return what the report says of weights that are integers, as those of layers in 4 or 8 bits."""
    dtypes = {weight.dtype for weight in parameters_of(model)}
    integers = (dtype for dtype in dtypes if not (dtype.is_floating_point or dtype.is_complex))
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in integers))
    return f"weights of {type(model).__name__} in {names} left alone" if names else None


class RoundedOnce:
    """The copies of frozen weights in autocast's dtype.

    Parameters
    ----------
    dtype : torch.dtype
        Autocast's.

    Attributes
    ----------
    rules : dict
        The rules by which layers take the copies, by operator.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copies = WeightCopies(lambda weight: weight.to(dtype))
        self._wanted: set[int] = set()  # ids of weights
        self.rules: dict[str, OperatorRule] = dict.fromkeys(OPERATORS, self._rule)

    def prepare(self, model: nn.Module) -> None:
        """Make the copies that the last call of a model has missed."""
        if self._wanted:
            wanted, self._wanted = self._wanted, set()
            for weight in parameters_of(model):
                if id(weight) in wanted and is_frozen(weight) and self._copies.find(weight) is None:
                    self._copies.make(weight)

    @contextmanager
    def in_force(self) -> Iterator[RoundedOnce]:
        """Keep copies, and let rules decide about layers, until the end of the body."""
        with self._copies.kept(), ruled(OPERATORS, as_torch_does):
            yield self

    def _rule(self, function: Any, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # `disable_casts` sets another dtype. A mode that sees operators may be one without numbers.
        if torch.get_autocast_dtype("cpu") is self._dtype and not in_dispatch_mode() and not in_functorch():
            args = tuple(self._rounded(arg, args) if type(arg) in (nn.Parameter, NarrowWeight) else arg for arg in args)
        return function(keys, *args, **kwargs)

    def _rounded(self, weight: Tensor, args: tuple[Any, ...]) -> Tensor:
        if isinstance(weight, NarrowWeight):
            narrow = weight.narrow_numbers() if self._dtype is torch.bfloat16 else None
            return weight if narrow is None else narrow
        if not is_frozen(weight):
            self._copies.forget(weight)
            return weight
        copy = self._copies.find(weight)
        if copy is None and _would_be_kept(args):
            self._wanted.add(id(weight))
        return weight if copy is None else copy


def rounded_once(dtype: torch.dtype) -> AbstractContextManager[RoundedOnce]:
    """Return a context in which frozen weights are rounded once, for all runs."""
    return shared_change(("frozen weights", dtype), lambda: RoundedOnce(dtype).in_force())


def _would_be_kept(args: tuple[Any, ...]) -> bool:
    """Whether torch would keep the cast of a weight until the backward, for the gradient of an input."""
    has_input = any(isinstance(arg, Tensor) and arg.requires_grad and type(arg) is not nn.Parameter for arg in args)
    return has_input and torch.is_grad_enabled() and not has_saved_tensor_hooks() and not in_backward()
