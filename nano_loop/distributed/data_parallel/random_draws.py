"""Random numbers where ranks share each batch (``split_batches=True``): those of one process with the whole batch.

All ranks have the same random states. What is drawn by the batch, such as a dropout's mask or noise, each of them draws
for the whole batch, and keeps its part. Everything else, such as the weights of a layer that the loop makes, is the
same on all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.split_batches import Share
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.kernels.bernoulli import same_draws
from nano_loop.kernels.drawing_order import drawn, in_order, treated_as_masks
from nano_loop.patching.operators import Kernel, gives_kernels, overridden
from nano_loop.patching.patch_table import listening
from nano_loop.patching.torch_private import SAMPLING, base_of
from nano_loop.patching.user_code import users_place

#: What a rank is in that draws random numbers at a place for the first time.
DRAWING = "a draw of random numbers"
_FILLING = (
    *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "random_.from", "random_.to"),
)
#: What takes values, which say how often some of these draw, from the first element to the last.
_BY_VALUES = (
    *("poisson", "binomial", *SAMPLING),
    *("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor"),
)
_LIKE = ("rand_like", "randn_like", "randint_like", "randint_like.low_dtype")
#: The code of modules whose dropouts take the steps of time first.
_RECURRENT = frozenset(kind.forward.__code__ for kind in (nn.RNN, nn.LSTM, nn.GRU))


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


@contextmanager
def drawing(draw: Callable[..., Tensor | None], ranks: Ranks) -> Iterator[None]:
    """Let `draw` be asked, as by `drawn`, in the body, for all that torch draws elementwise or by rows.

    Raises
    ------
    NanoConfigError
        Before torch 2.9.
    """
    if not gives_kernels():
        expected = f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
        raise NanoConfigError(error_message("split_batches=True", expected, "Remove split_batches=True"))
    operators: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
        **dict.fromkeys(_LIKE, _like),
        **dict.fromkeys(_BY_VALUES, partial(_by_values, ranks)),
        "bernoulli_.Tensor": _by_probabilities,
        "multinomial": partial(_multinomial, ranks),
        "rrelu_with_noise": partial(_rrelu, ranks, False),
        "rrelu_with_noise_": partial(_rrelu, ranks, True),
        "randperm.generator_out": _permutation,
    }
    with ExitStack() as stack:
        stack.enter_context(listening(drawn, draw))
        stack.enter_context(same_draws())
        for operator in _FILLING:
            stack.enter_context(in_order(operator))
        for operator, make in operators.items():
            stack.enter_context(overridden(operator, make, "CPU"))
        yield


def may_be_by_batch(tensor: Tensor, generator: torch.Generator | None) -> bool:
    """Whether what is drawn may have a dimension of the batch, unlike data that one rank makes to evaluate alone."""
    is_for_training = _is_default(generator) or torch.is_grad_enabled()
    return is_for_training and tensor.dim() > 0 and tensor.device.type == "cpu"


def _is_default(generator: torch.Generator | None) -> bool:
    return generator is None or generator is torch.default_generator


class RandomDraws:
    """Draws in the thread of the loop, of any generator.

    Which are by the batch is found out once for each place in the program: by the sizes of the tensor on all ranks,
    where these have different numbers of samples, and else by its sizes in the witness. Where the witness does not say,
    masks and ``*_like`` of what is no parameter are taken for it.

    Parameters
    ----------
    ranks : Ranks
        The processes.
    in_witness : callable
        Takes a number n. Returns the shape, and the order, of what the witness has drawn as the n-th of this batch, or
        None on other ranks than 0, and where it does not say.

    Attributes
    ----------
    drawn_alike : dict of str
        The user's lines whose draws are of the share's size, and were taken for none by the batch.
    """

    def __init__(self, ranks: Ranks, in_witness: Callable[[int], Any] = lambda number: None) -> None:
        self.drawn_alike: dict[str, None] = {}
        self._ranks = ranks
        self._in_witness = in_witness
        self._sites: dict[tuple[int, ...], int | None] = {}  # the dimension of the batch, by the place
        self._orders: dict[tuple[int, ...], tuple[int, ...]] = {}  # see `_Part`, by the place
        self._unknown: set[tuple[int, ...]] = set()  # places of which the witness has said nothing
        self._draws = False  # whether a tensor is drawn for the whole batch now

    def draw(
        self, tensor: Tensor, generator: torch.Generator | None, fill: Callable[[Tensor], Tensor], is_mask: bool
    ) -> Tensor | None:
        """Fill a tensor for the whole batch, and give `tensor` its part; return None if it is not by the batch."""
        part = self._part(tensor, generator, is_mask)
        if part is None:
            return None
        self._draws = True
        try:
            whole = fill(part.whole_like(tensor))
        finally:
            self._draws = False
        return tensor.copy_(part.of(whole, tensor))

    def _part(self, tensor: Tensor, generator: torch.Generator | None, is_mask: bool) -> _Part | None:
        context = self._ranks.context
        split, share = context.split, context.divided
        is_evaluation = context.sharding.whole and not torch.is_grad_enabled()  # of whole batches
        if split is None or not split.is_loops or is_evaluation:
            return None
        if split.unequal_since is not None and _is_default(generator):
            self._ranks.equalize_random_states(DRAWING)
        if share is None or not may_be_by_batch(tensor, generator):
            return None
        number, split.draws = split.draws, split.draws + 1  # one inside of another counts, too
        if self._draws:
            return None
        site = _site(tensor.dim())
        if site not in self._sites:
            self._learn(site, tensor, share, number)
        dimension = self._sites[site] if site in self._sites else self._guessed(tensor, share, is_mask)
        if dimension is None or tensor.size(dimension) % share.samples:
            return None
        times = tensor.size(dimension) // share.samples  # of flattened samples, or of heads of an attention
        if share.samples > 1 or site not in self._orders:  # strides say nothing about a dimension of one sample
            self._orders[site] = order_of(tensor)
        return _Part(dimension, share.start * times, share.total * times, self._orders[site])

    def _learn(self, site: tuple[int, ...], tensor: Tensor, share: Share, number: int) -> None:
        """Find out which dimension of a tensor is the batch's, if any. Collective where it may have one."""
        if not share.is_even:
            self._sites[site], self._orders[site] = self._compared(tensor, share)
        elif site not in self._unknown and any(size and size % share.samples == 0 for size in tensor.shape):
            shape, order = self._ranks.broadcast(self._in_witness(number), what=DRAWING) or ((), ())
            own = [*tensor.shape]
            by_batch = [[*own[:i], size * share.size, *own[i + 1 :]] for i, size in enumerate(own)]
            if shape in (own, *by_batch):
                self._sites[site] = None if shape == own else by_batch.index(shape)
                self._orders[site] = tuple(order)
            else:
                self._unknown.add(site)

    def _compared(self, tensor: Tensor, share: Share) -> tuple[int | None, tuple[int, ...]]:
        """Return the dimension in which a tensor has the sizes of the ranks' shares, and its order. Collective.

        Raises
        ------
        NanoError
            If the sizes differ otherwise.
        """
        drawn_by = self._ranks.gather((tuple(tensor.shape), order_of(tensor)), DRAWING)
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
        hint = "Draw one row, or one for each of a fixed number of places, for each sample. Or omit split_batches"
        raise NanoError(error_message(got, allowed, hint))

    def _guessed(self, tensor: Tensor, share: Share, is_mask: bool) -> int | None:
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
        if is_of_batch and (place := users_place()) is not None:
            self.drawn_alike[f"{os.path.basename(place.filename)}:{place.number}"] = None
        return None


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor as they lie in memory, the outermost one first."""
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
        with treated_as_masks(not _is_of_parameter(tensor)):
            made: Tensor = original(keys, tensor, *args, **kwargs)
        return made

    return like


def _by_probabilities(original: Kernel | None) -> Callable[..., Tensor]:
    """Return `Tensor.bernoulli_` by a tensor of probabilities, whose draws are uniform numbers of its precision."""

    def bernoulli_(
        keys: torch.DispatchKeySet, tensor: Tensor, p: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        if not ((p >= 0) & (p <= 1)).all():
            assert original is not None
            return cast("Tensor", original(keys, tensor, p, generator=generator))  # raises torch's error
        numbers = torch.empty_like(tensor, dtype=torch.promote_types(p.dtype, torch.float32))
        with treated_as_masks(True):
            numbers.uniform_(generator=generator)
        return tensor.copy_(numbers < p)

    return bernoulli_


def _by_values(ranks: Ranks, original: Kernel) -> Callable[..., Tensor]:
    """Return an operator whose inputs are gathered for the whole batch."""

    def draw(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Tensor:
        inputs: list[Tensor] = torch.broadcast_tensors(*filter(torch.is_tensor, args))  # type: ignore[no-untyped-call]
        made = torch.empty(inputs[0].shape, dtype=inputs[0].dtype)

        def fill(plain: Tensor) -> Tensor:
            whole = iter(_whole(ranks, inputs, made.shape, plain.shape))
            every = [next(whole) if isinstance(item, Tensor) else item for item in args]
            return plain.copy_(original(keys, *every, **kwargs))

        generator = next((item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)), None)
        return drawn(made, generator, fill, is_mask=not any(map(_is_of_parameter, inputs)))

    return draw


def _multinomial(ranks: Ranks, original: Kernel) -> Callable[..., Tensor]:
    def multinomial(
        keys: torch.DispatchKeySet, weights: Tensor, count: int, replacement: bool = False, *, generator: Any = None
    ) -> Tensor:
        made = torch.empty(*weights.shape[:-1], count, dtype=torch.int64)

        def fill(plain: Tensor) -> Tensor:
            (rows,) = _whole(ranks, [weights], made.shape[:-1], plain.shape[:-1])
            return plain.copy_(original(keys, rows, plain.size(-1), replacement, generator=generator))

        return drawn(made, generator, fill, is_mask=True)

    return multinomial


def _rrelu(ranks: Ranks, in_place: bool, original: Kernel) -> Callable[..., Tensor]:
    """Return an `RReLU`, which draws a slope for each element that is not positive."""

    def rrelu(
        keys: torch.DispatchKeySet,
        x: Tensor,
        noise: Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        def fill(plain: Tensor) -> Tensor:
            (whole,) = _whole(ranks, [x], noise.shape, plain.shape)
            original(keys, whole.clone(), plain, lower, upper, True, generator)
            return plain

        if not training:
            return cast("Tensor", original(keys, x, noise, lower, upper, False, generator))
        slopes = drawn(noise, generator, fill, is_mask=True)  # 1 for positive elements
        return x.mul_(slopes) if in_place else x * slopes

    return rrelu


def _permutation(original: Kernel) -> Callable[..., Tensor]:
    def randperm(keys: torch.DispatchKeySet, count: int, *, generator: torch.Generator | None, out: Tensor) -> Tensor:
        def fill(plain: Tensor) -> Tensor:
            if len(plain) == count:
                return cast("Tensor", original(keys, count, generator=generator, out=out))
            got = f"torch.randperm of the {count} samples that this rank has of {len(plain)}"
            expected = "with split_batches a rank has no samples of the others to put in place of its own"
            hint = "Mix samples in the loader's collate_fn, which gets whole batches, or omit split_batches"
            raise NanoError(error_message(got, expected, hint))

        return drawn(torch.empty(count, dtype=torch.bool), generator, fill)

    return randperm


def _whole(ranks: Ranks, inputs: Sequence[Tensor], own: torch.Size, plain: torch.Size) -> Sequence[Tensor]:
    """Return the inputs of a draw in the plain loop's shape: those of all ranks, if its own is a part. Collective."""
    for dimension, (size, total) in enumerate(zip(own, plain, strict=True)):
        if size != total:
            gathered = ranks.gather([item.clone() for item in inputs], DRAWING)
            return [torch.cat(parts, dimension) for parts in zip(*gathered, strict=True)]
    return inputs


def _caller() -> FrameType | None:
    """Return the call of `functional.dropout`, or of a recurrent module, that draws; compiled code has none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not functional.dropout.__code__ and frame.f_code not in _RECURRENT:
        frame = frame.f_back
    return frame


def _is_of_parameter(tensor: Tensor) -> bool:
    return isinstance(base_of(tensor), nn.Parameter)
