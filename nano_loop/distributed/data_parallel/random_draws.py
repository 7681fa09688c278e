"""Random numbers where ranks share each batch (``split_batches=True``): those of one process with the whole batch.

All ranks have the same random states. What is drawn by the batch, such as a dropout's mask or noise, each of them draws
for the whole batch, and keeps its part. Everything else, such as the weights of a layer that the loop makes, is the
same on all of them.
"""

from __future__ import annotations

import functools
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
from nano_loop.errors import NanoError, error_message
from nano_loop.kernels.dropout.bernoulli import same_draws
from nano_loop.kernels.dropout.drawing_order import drawn, in_order, taken_for_masks
from nano_loop.patching.attributes import replaced
from nano_loop.patching.operators.operators import Kernel, gives_kernels, overridden
from nano_loop.patching.patch_table import listening
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.patching.user_code import users_place

#: What a rank is in that draws random numbers at a place for the first time.
DRAWING = "a draw of random numbers"
_FILLING = (
    *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "random_.from", "random_.to"),
)
_LIKE = ("rand_like", "randn_like", "randint_like", "randint_like.low_dtype")
_NORMAL = ("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")


class _Part(NamedTuple):
    """Which part of the tensor that the plain loop draws is this rank's."""

    dimension: int
    start: int
    total: int

    def of(self, whole: Tensor, like: Tensor) -> Tensor:
        return whole.narrow(self.dimension, self.start, like.size(self.dimension))

    def whole_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor for the whole batch, whose dimensions lie in memory as those of `tensor`."""
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        sizes = [self.total if dimension == self.dimension else tensor.size(dimension) for dimension in order]
        return torch.empty(sizes, dtype=tensor.dtype).permute([order.index(place) for place in range(tensor.dim())])


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
        self._noted: set[tuple[int, ...]] = set()
        self._draws = False  # whether a tensor is drawn for the whole batch now

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Divide what is drawn by the batch in the body. Before torch 2.9 that is the masks of dropouts alone."""
        operators: dict[str, Callable[[Kernel | None], Callable[..., Tensor]]] = {
            **dict.fromkeys(_FILLING, in_order),
            **dict.fromkeys(_LIKE, _like),
            **dict.fromkeys(_NORMAL, _normal),
            "bernoulli_.Tensor": _by_probabilities,
        }
        with ExitStack() as stack:
            stack.enter_context(listening(drawn, self.draw))
            stack.enter_context(replaced(functional, "dropout", _dropout))
            stack.enter_context(same_draws())
            for operator, make in operators.items() if gives_kernels() else ():
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
        # A worker of a loader, and another thread, draw by themselves. A deep checkpoint recomputes in another thread.
        is_loops = os.getpid() == self._process and (split.is_here or in_backward())
        if self._ranks.context.sharding.whole and not torch.is_grad_enabled():  # an evaluation, of whole batches
            return None
        if not is_loops or (generator is not None and generator is not torch.default_generator):
            return None
        site = _site(tensor.dim())
        if not share.is_even and site not in self._sites:
            self._sites[site] = self._compared(tensor, share)
        dimension = self._sites[site] if site in self._sites else self._guessed(tensor, share, is_mask, site)
        if dimension is None or tensor.size(dimension) % share.count:
            return None
        times = tensor.size(dimension) // share.count  # of flattened samples, or of heads of an attention
        return _Part(dimension, share.start * times, share.total * times)

    def _compared(self, tensor: Tensor, share: Share) -> int | None:
        """Return the dimension in which a tensor has the sizes of the ranks' shares. Collective.

        Raises
        ------
        NanoError
            If the sizes differ otherwise.
        """
        shapes = self._ranks.gather(tuple(tensor.shape), DRAWING)
        counts = [Share.of(share.total, rank, share.size).count for rank in range(share.size)]
        if len(set(shapes)) == 1:
            return None
        for dimension, size in enumerate(shapes[0]):
            expected = [(*shapes[0][:dimension], size * count / counts[0], *shapes[0][dimension + 1 :]) for count in counts]
            if shapes == expected:
                return dimension
        got = f"ranks with {counts} samples of a batch draw random numbers of the shapes {[*map(list, shapes)]}"
        expected_ = "with split_batches a draw has one dimension of so many samples, or is the same on all ranks"
        hint = "Draw one row, or one for each of a fixed number of places, for each sample. Or leave split_batches out"
        raise NanoError(error_message(got, expected_, hint))

    def _guessed(self, tensor: Tensor, share: Share, is_mask: bool, site: tuple[int, ...]) -> int | None:
        """Return the dimension of the batch where all ranks have as many samples, so that sizes say nothing."""
        if is_mask and tensor.size(0) == share.count:
            return 0
        if is_mask and tensor.dim() > 2 and tensor.size(1) == share.count:  # time comes first, as in an LSTM
            return 1
        is_of_batch = tensor.size(0) == share.count or (is_mask and tensor.size(0) % share.count == 0)
        if is_of_batch and site not in self._noted:
            self._noted.add(site)
            place = users_place()
            if place is not None:
                self.drawn_alike[f"{os.path.basename(place.filename)}:{place.number}"] = None
        return None


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
        tensors = [one for one in (mean, std) if isinstance(one, Tensor)]
        made = tensors[0].new_empty(torch.broadcast_shapes(*[one.shape for one in tensors]))
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


def _dropout(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def dropout(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or not _is_of_parameter(input):
            return original(input, *args, **kwargs)
        with taken_for_masks(False):
            return original(input, *args, **kwargs)

    return dropout


def _is_of_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
