"""The operators of fp32 tensors whose algorithms are timed: torch's kernels, and C functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.autotune.algorithms import leaf_of, with_gradients, without_gradients
from nano_loop.autotune.sizes import MOST_ELEMENTS, joined, layout, most_elements, rough
from nano_loop.autotune.tuned_operator import TunedOperator
from nano_loop.autotune.tuner import Algorithm, Race
from nano_loop.kernels import fp32
from nano_loop.kernels.attention import fp32_attention
from nano_loop.kernels.linear import fp32_product
from nano_loop.kernels.loss import cross_entropy
from nano_loop.kernels.memory import UnsupportedTensorError
from nano_loop.kernels.norm import norms
from nano_loop.kernels.replacement import Arguments

#: How far results of functions for fp32 may be from those of torch, for both round sums of many numbers.
IN_FP32 = 2.0**-12
#: Minimum number of rows of a product that are measured.
_MIN_ROWS = 64
#: Seconds that Python takes to ask for the algorithm of a call in fp32, which torch's kernel alone would not take. In a
#: step it takes twice as long as in a loop of nothing else, since caches are cold.
_OVERHEAD = 20e-6


def _fp32_key(call: Arguments) -> str:
    words = [word for argument in (*call.arguments, *call.numbers) for word in _in_words(argument)]
    return joined("fp32", call.operator, *words)


def _in_words(argument: Any) -> Iterator[object]:
    """Yield what the time of a call depends on: of a tensor its sizes and its layout, and no factor."""
    if isinstance(argument, Tensor):
        yield from (rough(argument.shape), layout(argument))
    elif not isinstance(argument, float):
        yield "-" if argument is None else str(argument).replace(" ", "")


def _fp32_race(call: Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    arguments = [*call.arguments]
    if call.is_differentiated:  # the loss of a vocabulary's logits, of which some rows are measured
        rows = max(MOST_ELEMENTS // max(arguments[0][0].numel(), 1), 1)
        arguments[:2] = [tensor[:rows] for tensor in arguments[:2]]
    if not 0 < most_elements(tensor for tensor in arguments if isinstance(tensor, Tensor)) <= MOST_ELEMENTS:
        return None

    def of(name: str) -> Algorithm:
        def computed(*values: Any) -> Any:
            results = algorithms[name](*values)
            if results is None:
                raise UnsupportedTensorError(f"{call.operator} is left to torch")
            return results

        def with_gradient() -> Sequence[Tensor]:
            leaf = leaf_of(arguments[0], torch.float32)
            return with_gradients(lambda: computed(leaf, *arguments[1:]).sum(), [leaf], torch.ones((), device="cpu"))

        return with_gradient if call.is_differentiated else without_gradients(arguments, {name: computed})[name]

    return _race_in_fp32({name: of(name) for name in algorithms})


def _race_in_fp32(race: Mapping[str, Algorithm]) -> Race:
    return Race(race, fp32.TORCH, None, bound=IN_FP32, torchs_is_beaten=True, overhead=_OVERHEAD)


def _product_race(call: Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race:
    a, *others = call.arguments
    return _race_in_fp32(without_gradients([some_rows(a, others[0]), *others], algorithms))


def some_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return some rows of a matrix, for a product of a vocabulary's layer, whose result takes memory."""
    return a[: max(MOST_ELEMENTS // b.size(-1), _MIN_ROWS)]


FP32_OPERATORS = (
    *(
        TunedOperator(fp32.rule_of(kernel), _fp32_key, _fp32_race, has_gradients=True)
        for kernel in (cross_entropy.KERNEL, norms.KERNEL, fp32_attention.KERNEL)
    ),
    TunedOperator(fp32_product.RULE, _fp32_key, _product_race, has_gradients=True),
)
