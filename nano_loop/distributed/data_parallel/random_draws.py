"""Random numbers where ranks share each batch (``split_batches=True``): those of one process with the whole batch.

All ranks have the same random states. What is drawn by the batch, such as a dropout's mask or noise, each of them draws
for the whole batch, and keeps its part. Everything else, such as the weights of a layer that the loop makes, is the
same on all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.split_batches import Share
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.kernels.dropout.bernoulli import same_draws
from nano_loop.kernels.dropout.drawing_order import drawn, in_order, taken_for_masks
from nano_loop.patching.operators.operators import Kernel, gives_kernels, overridden
from nano_loop.patching.patch_table import listening
from nano_loop.patching.torch_private import base_of
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.patching.user_code import users_place

#: What a rank is in that draws random numbers at a place for the first time.
DRAWING = "a draw of random numbers"
_FILLING = (
    *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "random_.from", "random_.to"),
)
_LIKE = ("rand_like", "randn_like", "randint_like", "randint_like.low_dtype")
#: The code of modules whose dropouts take the steps of time first.
_RECURRENT = frozenset(kind.forward.__code__ for kind in (nn.RNN, nn.LSTM, nn.GRU))
_NORMAL = ("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")


class _Part(NamedTuple):
    """Which part of the tensor that the plain loop draws is this rank's.

    Parameters
    ----------
    dimension, start, total : int
        The dimension of the batch, where the part begins in it, and its size in the plain loop.
    order : tuple of int
        The dimensions as they lie in memory in the plain loop, the outermost one first.
    """

    dimension: int
    start: int
    total: int
    order: tuple[int, ...]

    def of(self, whole: Tensor, like: Tensor) -> Tensor:
        return whole.narrow(self.dimension, self.start, like.size(self.dimension))

    def whole_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor for the whole batch."""
        sizes = [self.total if place == self.dimension else tensor.size(place) for place in self.order]
        return torch.empty(sizes, dtype=tensor.dtype).permute([self.order.index(i) for i in range(tensor.dim())])


class RandomDraws:
    """Draws of torch's default generator, in the thread of the loop.

    Where ranks have different numbers of samples, the sizes of a tensor on all of them say whether it is drawn by the
    batch; they are compared once for each place in the program. Where all have as many and the place is unknown, masks
    and ``*_like`` of what is no parameter are taken for it.

    Parameters
    ----------
    ranks : Ranks
        The processes.

    Attributes
    ----------
    drawn_alike : dict of str
        The user's lines whose draws are of the share's size, and were taken for none by the batch.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.drawn_alike: dict[str, None] = {}
        self._ranks = ranks
        self._process = os.getpid()
        self._sites: dict[tuple[int, ...], int | None] = {}  # the dimension of the batch, by the place
        self._orders: dict[tuple[int, ...], tuple[int, ...]] = {}  # see `_Part`, by the place
        self._noted: set[tuple[int, ...]] = set()
        self._draws = False  # whether a tensor is drawn for the whole batch now

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Divide what is drawn by the batch in the body.

        Raises
        ------
        NanoConfigError
            Before torch 2.9.
        """
        if not gives_kernels():
            expected = f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
            raise NanoConfigError(error_message("split_batches=True", expected, "Remove split_batches=True"))
        operators: dict[str, Callable[[Kernel | None], Callable[..., Tensor]]] = {
            **dict.fromkeys(_LIKE, _like),
            **dict.fromkeys(_NORMAL, _normal),
            "bernoulli_.Tensor": _by_probabilities,
        }
        with ExitStack() as stack:
            stack.enter_context(listening(drawn, self.draw))
            stack.enter_context(same_draws())
            for operator in _FILLING:
                stack.enter_context(in_order(operator))
            for operator, make in operators.items():
                stack.enter_context(overridden(operator, make, "CPU"))
            yield

    def draw(
        self, tensor: Tensor, generator: torch.Generator | None, fill: Callable[[Tensor], Tensor], is_mask: bool
    ) -> Tensor | None:
        """Fill a tensor for the whole batch, and give `tensor` its part; return None if it is not by the batch."""
        part = None if self._draws else self._part(tensor, generator, is_mask)
        if part is None:
            return None
        self._draws = True
        try:
            whole = fill(part.whole_like(tensor))
        finally:
            self._draws = False
        return tensor.copy_(part.of(whole, tensor))

    def _part(self, tensor: Tensor, generator: torch.Generator | None, is_mask: bool) -> _Part | None:
        split = self._ranks.context.split
        share = None if split is None else split.share
        if split is None or share is None or share.is_whole or not tensor.dim() or tensor.device.type != "cpu":
            return None
        # A worker of a loader, and another thread, draw separately. A deep checkpoint recomputes in another thread.
        is_loops = os.getpid() == self._process and (split.is_here or in_backward())
        if self._ranks.context.sharding.whole and not torch.is_grad_enabled():  # an evaluation, of whole batches
            return None
        if not is_loops or (generator is not None and generator is not torch.default_generator):
            return None
        site = _site(tensor.dim())
        if not share.is_even and site not in self._sites:
            self._sites[site], self._orders[site] = self._compared(tensor, share)
        dimension = self._sites[site] if site in self._sites else self._guessed(tensor, share, is_mask, site)
        if dimension is None or tensor.size(dimension) % share.samples:
            return None
        times = tensor.size(dimension) // share.samples  # of flattened samples, or of heads of an attention
        if share.samples > 1 or site not in self._orders:  # strides say nothing about a dimension of one sample
            self._orders[site] = _order(tensor)
        return _Part(dimension, share.start * times, share.total * times, self._orders[site])

    def _compared(self, tensor: Tensor, share: Share) -> tuple[int | None, tuple[int, ...]]:
        """Return the dimension in which a tensor has the sizes of the ranks' shares, and its order. Collective.

        Raises
        ------
        NanoError
            If the sizes differ otherwise.
        """
        drawn_by = self._ranks.gather((tuple(tensor.shape), _order(tensor)), DRAWING)
        shapes, order = [shape for shape, _ in drawn_by], drawn_by[0][1]  # no rank has more samples than rank 0
        counts = [Share.of(share.total, rank, share.size).samples for rank in range(share.size)]
        if len(set(shapes)) == 1:
            return None, order
        for dimension, size in enumerate(shapes[0]):
            before, behind = shapes[0][:dimension], shapes[0][dimension + 1 :]
            if shapes == [(*before, size * count / counts[0], *behind) for count in counts]:
                return dimension, order
        got = f"ranks with {counts} samples of a batch draw random numbers of the shapes {[*map(list, shapes)]}"
        allowed = "with split_batches a draw has one dimension of so many samples, or is the same on all ranks"
        hint = "Draw one row, or one for each of a fixed number of places, for each sample. Or leave split_batches out"
        raise NanoError(error_message(got, allowed, hint))

    def _guessed(self, tensor: Tensor, share: Share, is_mask: bool, site: tuple[int, ...]) -> int | None:
        """Return the dimension of the batch where all ranks have as many samples, so that sizes say nothing."""
        caller = _caller() if is_mask else None
        if caller is not None and caller.f_code in _RECURRENT:  # time comes first, also where the batch does outside
            return 1 if tensor.dim() == 3 and tensor.size(1) == share.samples else None
        is_mask = is_mask and (caller is None or not _is_of_parameter(caller.f_locals["input"]))
        if is_mask and tensor.size(0) == share.samples:
            return 0
        if is_mask and tensor.dim() > 2 and tensor.size(1) == share.samples:  # time comes first, as in a transformer
            return 1
        is_of_batch = tensor.size(0) == share.samples or (is_mask and tensor.size(0) % share.samples == 0)
        if is_of_batch and site not in self._noted:
            self._noted.add(site)
            place = users_place()
            if place is not None:
                self.drawn_alike[f"{os.path.basename(place.filename)}:{place.number}"] = None
        return None


def _order(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _site(*more: int) -> tuple[int, ...]:
    """Return the place in the program that calls nano_loop, by the calls that lead to it."""
    frame: FrameType | None = sys._getframe(2)
    places = [*more]
    while frame is not None:
        places += id(frame.f_code), frame.f_lasti
        frame = frame.f_back
    return tuple(places)


def _like(original: Kernel | None) -> Callable[..., Tensor]:
    assert original is not None

    def like(keys: torch.DispatchKeySet, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with taken_for_masks(not _is_of_parameter(tensor)):
            made: Tensor = original(keys, tensor, *args, **kwargs)
        return made

    return like


def _normal(original: Kernel | None) -> Callable[..., Tensor]:
    def normal(keys: torch.DispatchKeySet, mean: Any, std: Any, *, generator: torch.Generator | None = None) -> Tensor:
        if isinstance(std, Tensor) and (std < 0).any():
            assert original is not None
            return cast("Tensor", original(keys, mean, std, generator=generator))  # raises torch's error
        dtype = mean.dtype if isinstance(mean, Tensor) else std.dtype
        made = torch.empty_like(mean + std, dtype=dtype, memory_format=torch.contiguous_format)
        return made.normal_(generator=generator).mul_(std).add_(mean)

    return normal


def _by_probabilities(original: Kernel | None) -> Callable[..., Tensor]:
    """Return `Tensor.bernoulli_` by a tensor of probabilities, whose draws are uniform numbers of its precision."""

    def bernoulli_(
        keys: torch.DispatchKeySet, tensor: Tensor, p: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        if not ((p >= 0) & (p <= 1)).all():
            assert original is not None
            return cast("Tensor", original(keys, tensor, p, generator=generator))  # raises torch's error
        numbers = torch.empty_like(tensor, dtype=torch.promote_types(p.dtype, torch.float32))
        with taken_for_masks(True):
            numbers.uniform_(generator=generator)
        return tensor.copy_(numbers < p)

    return bernoulli_


def _caller() -> FrameType | None:
    """Return the call of `functional.dropout`, or of a recurrent module, that draws; compiled code has none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not functional.dropout.__code__ and frame.f_code not in _RECURRENT:
        frame = frame.f_back
    return frame


def _is_of_parameter(tensor: Tensor) -> bool:
    return isinstance(base_of(tensor), nn.Parameter)
