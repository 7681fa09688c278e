"""Replaces one of torch's kernels during a run: calls from set-up models use one of several algorithms.

There is one dispatcher function. For a call that is large enough, it checks in this order: whether the call belongs to
a set-up model, which precisions that model's `Policy` allows, and which algorithm was measured to be the fastest or is
the default. Otherwise, and if an algorithm does not support the tensors, torch's own kernel computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from nano_loop.kernels.memory import attempt, is_plain
from nano_loop.patching.operators import Kernel, overridden
from nano_loop.patching.ownership import Rules, rules_now
from nano_loop.patching.torch_private_autograd import current_node_number
from nano_loop.policy.product_precision import is_large

#: The names of algorithms: torch's kernel, a C function, and one that rounds the inputs of an fp32 product.
TORCH, COMPILED, ROUNDED = "torch", "compiled", "rounded"
#: `Call.numbers_in` if rounded inputs are kept; see `Override.keeps_rounded`.
KEPT = "kept"
#: The name of the fp32 reference. It is not a choice: algorithms must be as close to it as torch's own kernel is.
REFERENCE = "reference"
BF16, FP32 = (torch.bfloat16,), (torch.float32,)
#: Maximum number of elements in a measured tensor: algorithms need memory several times its size.
MOST_ELEMENTS = 1 << 24
#: Maximum exponent of a factor such that neither it nor its reciprocal is a denormal fp32 number.
_MOST_EXPONENT = 126


class Call(NamedTuple):
    """A call of an operator, the argument of algorithms."""

    operator: str  # a short name of the computation
    tensors: tuple[Any, ...]  # the tensors; those to be rounded come first
    #: Other arguments that affect the time. Of float factors, it only matters whether they are 0.
    numbers: tuple[Any, ...] = ()
    kernel: Kernel | None = None  # torch's own kernel, without the dispatch key set
    multiplications: int = 0  # of a product
    details: Any = None  # other data for algorithms that does not affect the time
    leaves: int = 0  # the number of leading tensors whose gradients are included in the time
    #: The precision that algorithms must reach, if the dtype of the first tensor does not determine it: "bf16", "fp32",
    #: "rounded" or "kept".
    numbers_in: str = ""
    #: The dimensions of the first tensor that may be batch dimensions. Calls with similar sizes in these share a
    #: result. By default, the outermost dimension in memory.
    rough: tuple[int, ...] = ()
    #: Accepts a call and returns the call to measure: smaller if it is large, without random numbers, and without side
    #: effects. Returns None if it should not be measured. By default, a call is measured unchanged unless a tensor has
    #: more than `MOST_ELEMENTS`.
    timed: Callable[[Call], Call | None] | None = None

    @property
    def is_measurable(self) -> bool:
        """Whether no tensor is empty or so large that algorithms would need too much memory."""
        arguments = (*self.tensors, *self.numbers)
        sizes = [argument.numel() for argument in arguments if isinstance(argument, torch.Tensor)]
        return 0 < max(sizes, default=0) <= MOST_ELEMENTS


#: Computes a call. Returns None if torch must compute it.
Compute = Callable[[Call], Any]


class Algorithm(NamedTuple):
    """An algorithm for an operator."""

    name: str
    compute: Compute
    dtypes: tuple[torch.dtype, ...]  # the supported dtypes of the first tensor
    #: Whether it rounds no more than torch does. Other algorithms round the inputs of products, and are only used if
    #: the model's policy allows it.
    is_exact: bool = True
    #: Whether it supports a call whose first tensor has one of the dtypes.
    supports: Callable[[Call], bool] = lambda call: True
    kernel: str | None = None  # the C file that a model's rules must name to allow it for fp32 tensors
    #: Whether it is used only if it is the default or was measured to be the fastest. If False, it computes every call
    #: that it supports.
    is_raced: bool = True
    #: Whether torch's fp32 kernel is the reference for the error of algorithms. If False, torch's own kernel is.
    has_reference: bool = False


def compiled_default(call: Call) -> str:
    """Return the unmeasured default: C functions on CPUs with AVX-512, where they were timed; torch otherwise."""
    return _default_in_fp32()


def by_kernel(call: Call) -> Any:
    """Compute a call by torch's kernel, passing its tensors and numbers."""
    assert call.kernel is not None
    return call.kernel(*call.tensors, *call.numbers)


def is_copy(gradient: Any, tensor: Any) -> bool:
    """Whether a tensor beside the gradient of a backward is a bf16 copy of an fp32 tensor."""
    are_tensors = isinstance(gradient, torch.Tensor) and isinstance(tensor, torch.Tensor)
    return are_tensors and gradient.dtype is torch.float32 and tensor.dtype is torch.bfloat16


def in_fp32(args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a backward's operator with bf16 copies converted to fp32, if one of them is in fp32."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    if current_node_number() is None or all(tensor.dtype is not torch.float32 for tensor in tensors):
        return args
    return [argument.float() if getattr(argument, "dtype", None) is torch.bfloat16 else argument for argument in args]


class Override(NamedTuple):
    """A replacement of one of torch's kernels."""

    operator: str  # the ATen operator with its overload, such as ``addmm.out``
    #: The algorithms other than torch's. The first one that is allowed and chosen is used.
    algorithms: tuple[Algorithm, ...]
    #: Accepts torch's kernel and the operator's arguments. Returns the call, or None if torch should always compute it.
    #: It is called first and must be cheap, because most calls of small models are too small.
    supports: Callable[..., Call | None]
    #: Returns the name of the algorithm to use if there is no measurement.
    default: Callable[[Call], str] = compiled_default
    by_torch: Compute = by_kernel  # computes a call by torch's kernel
    dispatch_key: str = "CPU"
    #: The key in `nano_loop.policy.product_precision.MIN_MULTIPLICATIONS` if the operator is a product.
    product: str = ""
    factors: int = 0  # the number of leading tensors that a product multiplies
    packs: bool = False  # whether a rounding algorithm needs no separate cast
    #: Accepts a call and its factors rounded to fp16 values, if `by_torch` cannot compute the call from these.
    in_fp16: Callable[[Call, list[torch.Tensor]], Any] | None = None
    #: Returns the rules of the model that a call belongs to, or None.
    rules: Callable[[Call], Rules | None] = lambda call: rules_now()
    #: Computes the operator if torch does not return its kernel (before 2.9). None: it is not replaced then.
    otherwise: Callable[..., Any] | None = None
    #: Whether the operator belongs to a backward and accepts bf16 copies beside an fp32 gradient, its first argument;
    #: see `nano_loop.kernels.narrow_copies`. torch's kernel gets them in fp32.
    reads_copies: bool = False
    keeps_rounded: bool = False

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context in which the kernel is replaced."""
        return overridden(self.operator, self.make, self.dispatch_key)

    def make(self, original: Kernel | None) -> Callable[..., Any]:
        """Return the function that replaces torch's kernel; see `overridden`."""
        supports, otherwise = self.supports, self.otherwise
        if original is None:
            assert otherwise is not None
            original = lambda keys, *args, **kwargs: otherwise(*args, **kwargs)  # noqa: E731
        torch_kernel: Kernel = original

        def dispatched(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            call = supports(functools.partial(torch_kernel, keys), *args, **kwargs)
            # The gradient may be None if the program has detached the result.
            result = None if call is None or call.tensors[0] is None else self.computed(call)
            if result is not None:
                return result
            return torch_kernel(keys, *(in_fp32(args) if self.reads_copies else args), **kwargs)

        return dispatched

    def computed(self, call: Call) -> Any:
        """Compute a call by its model's rules, or return None if torch must compute it."""
        rules = self.rules(call)
        if rules is None:
            return None
        policy, dtype = rules.policy, call.tensors[0].dtype
        if any(factor.dtype is torch.float32 for factor in self._factors(call)):
            dtype = torch.float32  # the first factor may be a bf16 copy
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
            call = call._replace(numbers_in=KEPT if self.keeps_rounded else ROUNDED)
            guess = algorithm.name if is_large(self.product, call.multiplications) else TORCH
        algorithms = {TORCH: self.by_torch, algorithm.name: algorithm.compute}
        if algorithm.has_reference:
            algorithms[REFERENCE] = self.by_torch
        return choose(rules, call, lambda: algorithms, guess) == algorithm.name

    def _factors(self, call: Call) -> tuple[torch.Tensor, ...]:
        return call.tensors[: self.factors]

    def _in_fp16(self, call: Call) -> Any:
        factors = [rounded_to_fp16(tensor) for tensor in self._factors(call)]
        if self.in_fp16 is not None:
            return self.in_fp16(call, factors)
        return self.by_torch(call._replace(tensors=(*factors, *call.tensors[self.factors :])))


def choose(rules: Rules, call: Call, algorithms: Callable[[], Mapping[str, Compute]], guess: str) -> str:
    """Return the name of the algorithm for a call by a model's rules: the default if nothing was measured."""
    return guess if rules.chooser is None else rules.chooser.algorithm(call, algorithms, guess)


def rounded_to_fp16(tensor: torch.Tensor) -> torch.Tensor:
    """Round an fp32 tensor to fp16 precision, relative to the power of two of its largest finite value.

    So no value overflows, and small gradients do not become zero unless they are at most 2⁻²⁵ of the largest.
    """
    largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if tensor.numel() else 0.0
    exponent = math.frexp(largest)[1] - 1 if largest else 0
    factor = 2.0 ** min(max(exponent, -_MOST_EXPONENT), _MOST_EXPONENT)
    return tensor.mul(1 / factor).half().float().mul_(factor)


@functools.cache
def _default_in_fp32() -> str:
    return COMPILED if torch.backends.cpu.get_cpu_capability() == "AVX512" else TORCH
