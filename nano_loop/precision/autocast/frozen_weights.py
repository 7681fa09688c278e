"""Frozen weights under autocast: the rounded copy that a graph would hold is made once instead of in every call.

An example are the weights beside an adapter. A weight gets a copy only after torch's cast of it was saved for the
backward, so that the peak memory of a step does not grow: not if an activation checkpoint drops the cast, and not in an
evaluation. Later calls of the model use the copy.

Each copy is valid until the weight may have been written to. torch can mark memory as copy-on-write. Here the memory
has no second owner, so nothing is ever copied: a request for the writable address only removes the mark. In-place
operators make such requests, even through ``.data`` or from another thread, and so do numpy, DLPack, other libraries,
and this package's C functions. This works without knowing the writers or replacing any attribute. Reading keeps the
mark, except for a few readers that request a writable address; the copy is then made again.

An address that was taken before the copy was made is not requested again. So no copy is made while anything else shares
the memory, such as an array. Foreign memory cannot be marked: that of a mapped file, of numpy, or shared with other
processes. Writes through an address that a program keeps as a number remain undetected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nano_loop.kernels.narrow_weight import NarrowWeight
from nano_loop.patching.members import parameters_of
from nano_loop.patching.operators import ruled
from nano_loop.patching.ownership import OperatorRule
from nano_loop.patching.patch_table import shared_change
from nano_loop.patching.torch_private import (
    address_of,
    below_autocast,
    has_lone_storage,
    has_saved_tensor_hooks,
    in_dispatch_mode,
    in_functorch,
    is_unwritten,
    shared_until_written,
    version,
)
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.precision.autocast.default_ops import as_torch_does


class Unwritten(NamedTuple):
    """The state of a weight when it was marked.

    Attributes
    ----------
    memory : weakref.ref
        Its storage. The weight itself is not referenced, not even weakly: `torch.utils.swap_tensors` rejects that.
    place : tuple
        Its location in the memory, and its version.
    """

    memory: weakref.ref[torch.UntypedStorage]
    place: tuple[Any, ...]

    def is_still(self, weight: Tensor) -> bool:
        """Whether this is the same weight, and nothing may have written to it since."""
        return is_unwritten(weight) and _place_of(weight) == self.place

    def end(self) -> None:
        """Remove the mark, which copies nothing."""
        storage = self.memory()
        if storage is not None:
            storage.data_ptr()


def takes_mark(weight: Tensor) -> bool:
    """Whether torch owns the memory of a strided tensor, so that a mark can detect writes. Removes any mark."""
    with torch.no_grad():
        try:
            shared_until_written(weight.detach())
        except RuntimeError:
            return False
    weight.data_ptr()
    return True


def marked(weight: Tensor, freed: Callable[[Any], None] | None = None) -> Unwritten | None:
    """Mark the memory of a weight, or return None if writes could go undetected.

    Parameters
    ----------
    weight : torch.Tensor
        A strided CPU tensor.
    freed : callable, optional
        Called when the memory is freed.
    """
    if not has_lone_storage(weight):
        return None
    with torch.no_grad(), suppress(RuntimeError):  # torch does not own the memory
        shared_until_written(weight.detach())
        return Unwritten(weakref.ref(weight.untyped_storage(), freed), _place_of(weight))
    return None


class WeightCopies:
    """Copies of weights, each with a mark that shows whether it is still valid.

    Parameters
    ----------
    convert : callable
        Copies a weight. It must only read it.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self._convert = convert
        self._copies: dict[int, tuple[Unwritten, Tensor]] = {}  # by weight id

    def find(self, weight: Tensor) -> Tensor | None:
        """Return the copy of a weight, or None. An outdated copy is dropped."""
        entry = self._copies.get(id(weight))
        if entry is None:
            return None
        unwritten, copy = entry
        if unwritten.is_still(weight):
            return copy
        self.forget(weight)
        return None

    def make(self, weight: Tensor) -> Tensor | None:
        """Make and keep a copy of a weight. Return None if writes could go undetected.

        Do not call this in an operator, whose arguments count as users of the memory.
        """
        key = id(weight)
        unwritten = marked(weight, lambda _: self._forget(key))
        if unwritten is None:
            return None
        with torch.inference_mode(False), torch.no_grad(), below_autocast():
            copy = self._convert(weight)
        if not unwritten.is_still(weight):  # another thread wrote to it
            return None
        self._copies[key] = unwritten, copy
        return copy

    def forget(self, weight: Tensor) -> None:
        """Drop the copy of a weight, if there is one."""
        self._forget(id(weight))

    def _forget(self, key: int) -> None:
        self._copies.pop(key, None)

    @contextmanager
    def kept(self) -> Iterator[WeightCopies]:
        """Keep the copies until the end of the body, then remove all marks."""
        try:
            yield self
        finally:
            for unwritten, _ in [*self._copies.values()]:
                unwritten.end()
            self._copies.clear()


def _place_of(weight: Tensor) -> tuple[Any, ...]:
    return address_of(weight), weight.storage_offset(), weight.shape, weight.stride(), version(weight)


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
    """The copies of frozen weights in autocast's dtype.

    Parameters
    ----------
    dtype : torch.dtype
        Autocast's dtype.

    Attributes
    ----------
    rules : dict
        The rules that make layers use the copies, by operator.
    """

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
            self._copies.forget(weight)
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
