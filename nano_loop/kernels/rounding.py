"""Says which products of fp32 tensors round their inputs, in ``precision="bf16-products"`` and ``precision=16``.

Sums and results are in fp32, so nothing but the product itself knows of bf16 or fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.replacement import Choose
from nano_loop.patching.ownership import rule_for

#: The name of the rule of calls into models whose products round their inputs, a `Rounding`.
RULE = "products that round"
#: The name of the rule that chooses an algorithm, which is no operator's, and the algorithms.
ALGORITHM = "rounding of products"
FP32, ROUNDED = "fp32", "rounded"

PRODUCT, CONVOLUTION, ATTENTION, LSTM = "product", "convolution", "attention", "lstm"
#: Number of multiplications of a thread by the kind of product from which on it rounds. Below it, what surrounds the
#: product usually exceeds the gain. It is a first guess where algorithms are measured.
MIN_MULTIPLICATIONS = {PRODUCT: 1 << 23, CONVOLUTION: 1 << 25, ATTENTION: 1 << 23, LSTM: 1 << 21}
#: The largest exponent of a factor that is no denormal number in fp32, and neither is one divided by it.
_MOST = 126
#: Products of less than this share of these multiplications are fp32 without a measurement, which takes time too.
_NEVER = 3 / 4


class Rounding:
    """What a run knows of the products of its models: the rule of their calls.

    Parameters
    ----------
    dtype : torch.dtype
        To whose numbers the inputs are rounded: bfloat16 or float16.
    record : callable
        Is told of each product that rounds: the dtype, its kind, and how many numbers it packs without a cast.

    Attributes
    ----------
    dtype : torch.dtype
        The same.
    fewest : dict of str to float
        The fewest multiplications of a product that has rounded, by its kind, since that was last emptied.
    multiplications : int
        Those of all products that have rounded.
    is_paused : bool
        Whether all products are in fp32 now.
    """

    def __init__(self, dtype: torch.dtype, record: Callable[[torch.dtype, str, int], None]) -> None:
        self.dtype = dtype
        self.fewest: dict[str, float] = {}
        self.multiplications = 0
        self.is_paused = False
        self._record = record
        self._least: dict[str, float] | None = None

    def may_round(self, kind: str, multiplications: int) -> bool:
        """Return whether a product is large enough to be measured, or to round."""
        if self.is_paused:
            return False
        if self._least is not None:
            return multiplications >= self._least[kind]
        return is_large(kind, multiplications / _NEVER)

    def __call__(self, kind: str, multiplications: int, packed: int) -> None:
        """Take note of a product that rounds."""
        self.fewest[kind] = min(self.fewest.get(kind, math.inf), multiplications)
        self.multiplications += multiplications
        self._record(self.dtype, kind, packed)

    def learn(self) -> None:
        """Let products that have fewer multiplications than all that have rounded be fp32, without asking again."""
        self._least = {kind: self.fewest.get(kind, math.inf) for kind in MIN_MULTIPLICATIONS}

    def forget(self) -> None:
        """Ask about all products again that are not too small."""
        self._least = None


class Arguments(NamedTuple):
    """The arguments of a product, which are the key of its measured times.

    Attributes
    ----------
    kind : str
        A key of `MIN_MULTIPLICATIONS`, or another word for a gradient.
    tensors : tuple of torch.Tensor or None
        What the algorithms take.
    numbers : tuple
        What else the time depends on.
    """

    kind: str
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[Any, ...] = ()


def dtype_of(kind: str, multiplications: int) -> torch.dtype:
    """Return the dtype to whose numbers a product of fp32 tensors may round its inputs: float32 where it may not.

    It may where it is large enough, and torch computes for a model whose products round.
    """
    rule: Any = rule_for(RULE)
    may_round = rule is not None and rule.may_round(kind, multiplications)
    return rule.dtype if may_round else torch.float32


def rounds_to_bf16() -> bool:
    """Return whether torch computes for a model whose products round their inputs to bf16 where they are large."""
    rule: Any = rule_for(RULE)
    return rule is not None and rule.dtype is torch.bfloat16


def may_round_to_bf16(kind: str, multiplications: int) -> bool:
    """Return whether a product of fp32 tensors may round its inputs to bf16."""
    return dtype_of(kind, multiplications) is torch.bfloat16


def is_large(kind: str, multiplications: float) -> bool:
    """Return whether a product that may round does so without a measurement."""
    return multiplications >= MIN_MULTIPLICATIONS[kind] * torch.get_num_threads()


def rounds(
    kind: str,
    multiplications: int,
    call: Arguments,
    in_fp32: Callable[..., Any],
    rounded: Callable[..., Any],
    packed: int = 0,
) -> bool:
    """Decide whether a product rounds that may do so, and note it for `RULE`.

    Parameters
    ----------
    kind : str
        A key of `MIN_MULTIPLICATIONS`.
    multiplications : int
        Their number.
    call : Arguments
        By which it is known.
    in_fp32, rounded : callable
        The algorithms. They take the tensors of `call`.
    packed : int
        How many numbers the product packs in bf16 without a cast.
    """
    algorithm = ROUNDED if is_large(kind, multiplications) else FP32
    choose: Choose | None = rule_for(ALGORITHM)
    if choose is not None:
        algorithm = choose(call, lambda: {FP32: in_fp32, ROUNDED: rounded}, algorithm)
    if algorithm == ROUNDED:
        note(kind, multiplications, packed)
    return algorithm == ROUNDED


def note(kind: str, multiplications: int, packed: int = 0) -> None:
    """Tell the rule of a product that rounds its inputs."""
    rule = rule_for(RULE)
    if rule is not None:
        rule(kind, multiplications, packed)


def in_fp16(kind: str, multiplications: int, *tensors: Tensor) -> list[Tensor] | None:
    """Return the inputs of a product that rounds them to fp16's numbers, and note it for `RULE`; None for others.

    The product itself is in fp32. Where all is finite, no sum overflows that does not in fp32.
    """
    if dtype_of(kind, multiplications) is not torch.float16 or not all(map(_is_plain, tensors)):
        return None
    note(kind, multiplications)
    return [_to_fp16s_numbers(tensor) for tensor in tensors]


def _is_plain(tensor: Tensor) -> bool:
    is_strided = tensor.dtype is torch.float32 and tensor.layout is torch.strided
    return is_strided and type(tensor) in (Tensor, torch.nn.Parameter) and not (tensor.is_conj() or tensor.is_neg())


def _to_fp16s_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 whose numbers are those of fp16, times the power of two of the largest finite one.

    So none overflows, and small gradients are not zero: those are that are 2⁻²⁵ of the largest, and less.
    """
    largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if tensor.numel() else 0.0
    exponent = math.frexp(largest)[1] - 1 if largest else 0
    factor = 2.0 ** min(max(exponent, -_MOST), _MOST)
    return tensor.mul(1 / factor).half().float().mul_(factor)
