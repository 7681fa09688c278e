"""Replaces one of torch's kernels during a run: calls of set-up models are computed by one of several algorithms.

There is one dispatcher function. Of a call that is large enough, it asks in this order: does it belong to a set-up
model; in which numbers may that model's `Policy` compute it; which algorithm has been measured to be the fastest, or is
the first guess. Otherwise, and where an algorithm does not take the tensors, torch's own kernel computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from nano_loop.kernels.memory import attempt, is_plain
from nano_loop.patching.operators.operators import Kernel, overridden
from nano_loop.patching.ownership import Rules, rules_now
from nano_loop.policy.product_precision import is_large

#: The names of algorithms: torch's kernel; a function in C; and one that rounds the inputs of a product in fp32.
TORCH, COMPILED, ROUNDED = "torch", "compiled", "rounded"
#: The name of what is no algorithm to choose, but computes in fp32 what others have to be as near to as torch's.
REFERENCE = "reference"
BF16, FP32 = (torch.bfloat16,), (torch.float32,)
#: Maximum number of elements of a tensor that is measured: algorithms take memory several times its size.
MOST_ELEMENTS = 1 << 24
#: The largest exponent of a factor that is no denormal number in fp32, and neither is one divided by it.
_MOST_EXPONENT = 126


class Call(NamedTuple):
    """A call of an operator. Algorithms take it.

    Attributes
    ----------
    operator : str
        What is computed, in a word.
    tensors : tuple of torch.Tensor or None
        The tensors. What is rounded stands first.
    numbers : tuple
        What else the time depends on. Factors, in float, change nothing but whether they are 0.
    kernel : callable or None
        torch's own, without the dispatch key set.
    multiplications : int
        How many there are, of a product.
    details : Any
        What algorithms need besides, and the time does not depend on.
    leaves : int
        Number of the first tensors whose gradients the time counts, too.
    numbers_in : {"", "bf16", "fp32", "rounded"}
        How exact algorithms have to be, where the dtype of the first tensor does not say that.
    rough : tuple of int
        The dimensions of the first tensor that may be those of a batch, which share a result with others of about their
        size. By default the outermost one in memory.
    timed : callable or None
        Takes a call, and returns it as it is measured: smaller where it is large, without random numbers, and so that
        it changes nothing that others see. None if it is not measured. By default a call is measured as it is, unless
        a tensor has more than `MOST_ELEMENTS`.
    """

    operator: str
    tensors: tuple[Any, ...]
    numbers: tuple[Any, ...] = ()
    kernel: Kernel | None = None
    multiplications: int = 0
    details: Any = None
    leaves: int = 0
    numbers_in: str = ""
    rough: tuple[int, ...] = ()
    timed: Callable[[Call], Call | None] | None = None

    @property
    def is_measurable(self) -> bool:
        """Whether the tensors are neither empty nor so large that algorithms would take too much memory."""
        arguments = (*self.tensors, *self.numbers)
        sizes = [argument.numel() for argument in arguments if isinstance(argument, torch.Tensor)]
        return 0 < max(sizes, default=0) <= MOST_ELEMENTS


#: Computes a call. Returns None where torch has to.
Compute = Callable[[Call], Any]


class Algorithm(NamedTuple):
    """One way to compute an operator.

    Attributes
    ----------
    name : str
        The name by which it is chosen.
    compute : callable
        Computes a call.
    dtypes : tuple of torch.dtype
        Those of the first tensor of a call.
    is_exact : bool
        Whether it rounds no more than torch's. Others, which round the inputs of products, are for models whose policy
        says so.
    supports : callable
        Whether it computes a call, whose tensors have such a dtype.
    kernel : str or None
        The C file that a model's rules have to name, so that it computes tensors in fp32.
    is_raced : bool
        Whether it has to be the first guess or the fastest. Else it computes every call that it supports.
    has_reference : bool
        Whether torch's kernel computes from fp32 what algorithms have to be as near to as torch's own. Else that is it.
    """

    name: str
    compute: Compute
    dtypes: tuple[torch.dtype, ...]
    is_exact: bool = True
    supports: Callable[[Call], bool] = lambda call: True
    kernel: str | None = None
    is_raced: bool = True
    has_reference: bool = False


def compiled_default(call: Call) -> str:
    """Return the first guess where nothing is measured: functions in C on CPUs with AVX-512, where they were timed."""
    return _default_in_fp32()


def by_kernel(call: Call) -> Any:
    """Compute a call by torch's kernel, which takes its tensors and numbers."""
    assert call.kernel is not None
    return call.kernel(*call.tensors, *call.numbers)


class Override(NamedTuple):
    """What replaces one of torch's kernels.

    Attributes
    ----------
    operator : str
        The ATen operator with its overload, such as ``addmm.out``.
    algorithms : tuple of Algorithm
        The algorithms, besides torch's. The first one that is allowed and chosen computes.
    supports : callable
        Takes torch's kernel, and the operator's arguments. Returns the call, or None where torch computes it in any
        case. It is asked first: most calls of small models are too small, and have to cost little.
    default : callable
        Takes a call. Returns the name of the algorithm that is taken without a measurement.
    by_torch : callable
        Computes a call by torch's kernel.
    dispatch_key : str
        The dispatch key of the kernel.
    product : str
        A key of `nano_loop.policy.product_precision.MIN_MULTIPLICATIONS`, if it is a product.
    factors : int
        How many of the first tensors a product multiplies.
    packs : bool
        Whether an algorithm that rounds does so without a cast.
    in_fp16 : callable or None
        Takes a call and its factors rounded to fp16's numbers, if `by_torch` does not compute it from these.
    rules : callable
        Takes a call. Returns the rules of the model that it belongs to, or None.
    otherwise : callable or None
        Computes what the operator does, where torch does not return its kernel (before 2.9). None: then it is torch's.
    """

    operator: str
    algorithms: tuple[Algorithm, ...]
    supports: Callable[..., Call | None]
    default: Callable[[Call], str] = compiled_default
    by_torch: Compute = by_kernel
    dispatch_key: str = "CPU"
    product: str = ""
    factors: int = 0
    packs: bool = False
    in_fp16: Callable[[Call, list[torch.Tensor]], Any] | None = None
    rules: Callable[[Call], Rules | None] = lambda call: rules_now()
    otherwise: Callable[..., Any] | None = None

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context in which the kernel is replaced."""
        return overridden(self.operator, self.make, self.dispatch_key)

    def make(self, original: Kernel | None) -> Callable[..., Any]:
        """Return the function that replaces torch's kernel; see `overridden`."""
        supports, otherwise = self.supports, self.otherwise
        if original is None:
            assert otherwise is not None
            original = lambda keys, *args, **kwargs: otherwise(*args, **kwargs)  # noqa: E731
        torchs: Kernel = original

        def dispatched(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            call = supports(functools.partial(torchs, keys), *args, **kwargs)
            # A backward may be called without a gradient, of what the program has cut off.
            result = None if call is None or call.tensors[0] is None else self.computed(call)
            return torchs(keys, *args, **kwargs) if result is None else result

        return dispatched

    def computed(self, call: Call) -> Any:
        """Compute a call as its model's rules say, or return None where torch has to."""
        rules = self.rules(call)
        if rules is None:
            return None
        policy, dtype = rules.policy, call.tensors[0].dtype
        rounds = bool(self.product) and policy is not None and dtype is torch.float32
        if policy is not None and rounds:
            rounds = policy.may_round(self.product, call.multiplications)
            if (
                rounds
                and policy.dtype is torch.float16
                and all(is_plain(factor, FP32) for factor in self._factors(call))
            ):
                policy.note(self.product, call.multiplications, 0)
                return self._in_fp16(call)
            rounds = rounds and policy.dtype is torch.bfloat16
        for algorithm in self.algorithms:
            if dtype not in algorithm.dtypes or not (algorithm.is_exact or rounds):
                continue
            if algorithm.kernel is not None and algorithm.kernel not in rules.kernels:
                continue
            if algorithm.supports(call) and self._is_chosen(algorithm, call, rules):
                result = attempt(algorithm.compute, call)
                if result is not None:
                    if policy is not None and not algorithm.is_exact:
                        packed = sum(factor.numel() for factor in self._factors(call)) if self.packs else 0
                        policy.note(self.product, call.multiplications, packed)
                    return result
        return None

    def _is_chosen(self, algorithm: Algorithm, call: Call, rules: Rules) -> bool:
        if not algorithm.is_raced or (rules.takes_kernels and algorithm.kernel is not None):
            return True
        if algorithm.is_exact:
            guess = self.default(call)
        else:
            if rules.policy is not None:
                rules.policy.tried.add(self.product)
            call = call._replace(numbers_in=ROUNDED)
            guess = algorithm.name if is_large(self.product, call.multiplications) else TORCH
        algorithms = {TORCH: self.by_torch, algorithm.name: algorithm.compute}
        if algorithm.has_reference:
            algorithms[REFERENCE] = self.by_torch
        return choose(rules, call, lambda: algorithms, guess) == algorithm.name

    def _factors(self, call: Call) -> tuple[torch.Tensor, ...]:
        return call.tensors[: self.factors]

    def _in_fp16(self, call: Call) -> Any:
        factors = [to_fp16s_numbers(tensor) for tensor in self._factors(call)]
        if self.in_fp16 is not None:
            return self.in_fp16(call, factors)
        return self.by_torch(call._replace(tensors=(*factors, *call.tensors[self.factors :])))


def choose(rules: Rules, call: Call, algorithms: Callable[[], Mapping[str, Compute]], guess: str) -> str:
    """Return the name of the algorithm that computes a call by a model's rules: a guess, where nothing is measured.

    `algorithms` returns them by name, and `REFERENCE` where torch's kernel is not it.
    """
    return guess if rules.chooser is None else rules.chooser.algorithm(call, algorithms, guess)


def to_fp16s_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in fp32 whose numbers are those of fp16, times the power of two of the largest finite one.

    So none overflows, and small gradients are not zero: those are that are 2⁻²⁵ of the largest, or less.
    """
    largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if tensor.numel() else 0.0
    exponent = math.frexp(largest)[1] - 1 if largest else 0
    factor = 2.0 ** min(max(exponent, -_MOST_EXPONENT), _MOST_EXPONENT)
    return tensor.mul(1 / factor).half().float().mul_(factor)


@functools.cache
def _default_in_fp32() -> str:
    return COMPILED if torch.backends.cpu.get_cpu_capability() == "AVX512" else TORCH
