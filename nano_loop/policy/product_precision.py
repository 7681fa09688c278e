"""The policy of a run: which products of fp32 tensors may round their inputs to bf16 or fp16.

For each call, `nano_loop.kernels.override` asks this, and then which algorithm was fastest (`nano_loop.autotune.race`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from nano_loop.patching.optimizers import called_before_steps, closure_of, requires_closure, with_closure
from nano_loop.patching.ownership import without_policy
from nano_loop.patching.patch_table import shared_change

PRODUCT, CONVOLUTION, ATTENTION, LSTM = "product", "convolution", "attention", "lstm"
#: Minimum number of multiplications per thread, by kind of product, from which on it rounds. Below it, the overhead
#: usually exceeds the gain. If algorithms are measured, this is only an initial guess.
MIN_MULTIPLICATIONS = {PRODUCT: 1 << 23, CONVOLUTION: 1 << 25, ATTENTION: 1 << 23, LSTM: 1 << 21}
#: Products below this fraction of the minimum are computed in fp32 without a measurement, which takes time too.
_NEVER = 3 / 4
#: Approximate multiplications per second of a thread in fp32, to estimate the cost of fp32 before it is measured.
_RATE = 5e10


class Policy:
    """Decides which products of a run's models round their inputs, with `record` called for each. Sums are fp32."""

    def __init__(self, dtype: torch.dtype, record: Callable[[torch.dtype, str, int], None]) -> None:
        self.dtype = dtype  # to which inputs are rounded: bfloat16 or float16
        self.has_rounded = False
        self.is_paused = False  # whether all products are in fp32 now
        self.large: set[str] = set()  # the kinds with a product that was large enough
        self.tried: set[str] = set()  # the kinds with an algorithm that rounds
        self._record = record
        self._least: dict[str, float] = {}
        self.watch()

    def may_round(self, kind: str, multiplications: int) -> bool:
        """Return whether a product is large enough to be measured or to round."""
        if self.is_paused or (kind == LSTM and self.dtype is torch.float16):  # LSTMs round only to bf16
            return False
        least = self._least.get(kind)
        may_round = is_large(kind, multiplications / _NEVER) if least is None else multiplications >= least
        if may_round:
            self.large.add(kind)
        return may_round

    def may_any_round(self, kind: str) -> bool:
        """Return whether products of a kind may round while the policy is not paused."""
        return self._least.get(kind, 0) < math.inf

    def note(self, kind: str, multiplications: int, packed: int) -> None:
        """Record a product that rounds, and the number of values that it packs in bf16 without a cast."""
        self.has_rounded = True
        self.tried.add(kind)
        self._fewest[kind] = min(self._fewest.get(kind, math.inf), multiplications)
        self._multiplications += multiplications
        self._record(self.dtype, kind, packed)

    def watch(self) -> None:
        """Observe which products round, from now until `learn`."""
        self._fewest: dict[str, float] = {}
        self._multiplications, self._began = 0, time.perf_counter()

    def learn(self) -> float:
        """Stop checking products below all that have rounded; return the fp32 time of these per time since `watch`."""
        self._least = {kind: self._fewest.get(kind, math.inf) for kind in MIN_MULTIPLICATIONS}
        seconds = self._multiplications / (_RATE * torch.get_num_threads())
        return seconds / (time.perf_counter() - self._began)

    def end(self) -> None:
        """Compute all products in fp32, without further checks."""
        self._least = dict.fromkeys(MIN_MULTIPLICATIONS, math.inf)

    def forget(self) -> None:
        """Check all products again that are not too small."""
        self._least = {}


def is_large(kind: str, multiplications: float) -> bool:
    """Return whether a product that may round does so without a measurement."""
    return multiplications >= MIN_MULTIPLICATIONS[kind] * torch.get_num_threads()


def line_searches_in_fp32() -> AbstractContextManager[None]:
    """Return a context in which steps that require a closure, whose losses they compare, have fp32 products."""
    return shared_change("line searches in fp32", lambda: called_before_steps(_with_closure_in_fp32))


def _with_closure_in_fp32(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = closure_of(args, kwargs) if len(args) > 1 or kwargs else None
    if closure is None or not requires_closure(optimizer):
        return None
    return with_closure(args, kwargs, without_policy()(closure))
