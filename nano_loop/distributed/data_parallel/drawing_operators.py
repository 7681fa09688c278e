"""torch's operators that draw random numbers, replaced so that ranks that share a batch draw for all of it.

Each of them calls `nano_loop.kernels.drawing_order.drawn`, which asks
`nano_loop.distributed.data_parallel.random_draws.RandomDraws`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.random_draws import DRAWING, is_of_parameter
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.kernels.bernoulli import same_draws
from nano_loop.kernels.drawing_order import drawn, in_order, treated_as_masks
from nano_loop.patching.operators import NO_KERNELS, Kernel, gives_kernels, overridden
from nano_loop.patching.patch_table import listening
from nano_loop.patching.torch_private import SAMPLING

_FILLING = (
    *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "random_.from", "random_.to"),
)
#: Operators of values that determine the number of draws, from the first element to the last.
_BY_VALUES = (
    *("poisson", "binomial", *SAMPLING),
    *("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor"),
)
_LIKE = ("rand_like", "randn_like", "randint_like", "randint_like.low_dtype")


@contextmanager
def drawing(draw: Callable[..., Tensor | None], ranks: Ranks) -> Iterator[None]:
    """In the body, let `draw` handle all draws of torch that are elementwise or by rows, as described in `drawn`."""
    if not gives_kernels():
        raise NanoConfigError(error_message("split_batches=True", NO_KERNELS, "Remove split_batches=True"))
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


def _like(original: Kernel | None) -> Callable[..., Tensor]:
    assert original is not None

    def like(keys: torch.DispatchKeySet, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with treated_as_masks(not is_of_parameter(tensor)):
            made: Tensor = original(keys, tensor, *args, **kwargs)
        return made

    return like


def _by_probabilities(original: Kernel | None) -> Callable[..., Tensor]:
    """Return `Tensor.bernoulli_` for a tensor of probabilities. It draws uniform numbers of their precision."""

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
        return drawn(made, generator, fill, is_mask=not any(map(is_of_parameter, inputs)))

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
            expected = "with split_batches, a rank cannot replace its samples by those of other ranks"
            hint = "Mix samples in the loader's collate_fn, which gets whole batches, or omit split_batches"
            raise NanoError(error_message(got, expected, hint))

        return drawn(torch.empty(count, dtype=torch.bool), generator, fill)

    return randperm


def _whole(ranks: Ranks, inputs: Sequence[Tensor], own: torch.Size, plain: torch.Size) -> Sequence[Tensor]:
    """Return the inputs of a draw in the plain loop's shape: those of all ranks, if its own are a part. Collective."""
    for dimension, (size, total) in enumerate(zip(own, plain, strict=True)):
        if size != total:
            gathered = ranks.gather([item.clone() for item in inputs], DRAWING)
            return [torch.cat(parts, dimension) for parts in zip(*gathered, strict=True)]
    return inputs
