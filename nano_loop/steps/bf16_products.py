"""Rounds the inputs of large products to bf16. All that a user can see, and all other operators, are fp32."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from nano_loop.autotune.budget import Budget
from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.kernels.attention import blocked_attention, rounded_attention
from nano_loop.kernels.build import CompiledKernel, for_report
from nano_loop.kernels.convolution import convolution, rounded_convolution
from nano_loop.kernels.linear import linear, product, rounded_product
from nano_loop.kernels.replacement import Replacement
from nano_loop.kernels.rnn import recurrence
from nano_loop.kernels.rounding import ATTENTION, CONVOLUTION, LSTM, PRODUCT, RULE, Rounding
from nano_loop.patching.deterministic_mode import may_depend_on_times
from nano_loop.patching.members import parameters_of
from nano_loop.patching.objects.optimizers import closure_of, hook_before_steps, requires_closure, with_closure
from nano_loop.patching.operators.operators import gives_kernels
from nano_loop.patching.ownership import without_rule
from nano_loop.patching.patch_table import process_wide, shared_change
from nano_loop.precision.diagnostics.cast_log import record_product
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name, has_modules
from nano_loop.steps.kernels.fast_attention import FastAttention
from nano_loop.steps.kernels.fast_convolution import FastConvolution
from nano_loop.steps.kernels.fast_linear import large_weights
from nano_loop.steps.step import SkipReason, Step
from nano_loop.steps.step_trial import StepTrial

#: Minimum number of elements of a weight. The products of smaller ones would only lose the time of the replacement.
SMALLEST_WEIGHT = 1 << 15
_MATRIX = 2
#: Between which steps of optimizers it is seen which products round: after most measurements of the tuner. Large ones
#: that were not measured by then round.
_LOOKS_FROM, _LOOKS_UNTIL = 24, 32
#: See `StepTrial`; and the part of the time for measurements that fp32 may cost.
_PAYS, _WINS, _ROUNDS, _PART = 1.03, 0.6, 16, 0.25
#: A trial is given up after so many steps of others since the last one of its optimizer.
_PATIENCE = 64
#: How many multiplications a thread does in a second in fp32, about: what fp32 would cost, before it is measured.
_RATE = 5e10
#: The one whose trial is under way, if any, and those whose products it is about. They are tried
#: together, for a replaced kernel costs its microseconds until none of them rounds.
_trials: list[Bf16Products] = process_wide("trials of fp32 in place of bf16 in products", [])
_settled: list[Bf16Products] = process_wide("steps whose products may be tried in fp32", [])


class _Kind(NamedTuple):
    """Products that are computed alike.

    Attributes
    ----------
    name : str
        A key of `nano_loop.kernels.rounding.MIN_MULTIPLICATIONS`.
    replacements : tuple of Replacement
        What replaces torch's kernels; those of no other kind. None for LSTMs, which `FastRnn` replaces.
    is_for : callable
        Whether a model may have such products that are large.
    kernel : CompiledKernel or None
        What has to be there for it; None: nothing.
    """

    name: str
    replacements: tuple[Replacement, ...]
    is_for: Callable[[nn.Module], bool]
    kernel: CompiledKernel | None = None


def _has_large_weights(model: nn.Module) -> bool:
    return any(weight.dim() >= _MATRIX for weight in large_weights(model, SMALLEST_WEIGHT))


def _has_lstms(model: nn.Module) -> bool:
    return has_modules(model, (nn.LSTM,))


_KINDS = (
    _Kind(PRODUCT, (*linear.REPLACEMENTS, *rounded_product.REPLACEMENTS), _has_large_weights, product.KERNEL),
    _Kind(CONVOLUTION, (*convolution.REPLACEMENTS, *rounded_convolution.REPLACEMENTS), FastConvolution.is_for),
    _Kind(ATTENTION, rounded_attention.REPLACEMENTS, FastAttention.is_for, blocked_attention.KERNEL),
    _Kind(LSTM, (), _has_lstms, recurrence.KERNEL),
)


def has_large_products(model: nn.Module) -> bool:
    """Whether a model may have products that are large enough to round."""
    return any(kind.is_for(model) for kind in _KINDS)


def reason_against(options: Options, machine: Machine) -> SkipReason | None:
    """Return why this process computes products in fp32, or None."""
    needs_instructions = options.kind.products is torch.bfloat16
    if options.use_ipex:
        return SkipReason("ipex", "fp32, since IPEX has its own kernels")
    if needs_instructions and not machine.has_fast_bf16:
        return SkipReason("no_bf16_instructions", "fp32, since this CPU has no bf16 instructions")
    if not gives_kernels():
        expected = f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
        return SkipReason("old_torch", f"fp32, since {expected}")
    if needs_instructions and product.KERNEL.unavailable is not None:
        return SkipReason("no_kernel", f"fp32, since {for_report(product.KERNEL.unavailable)}")
    return None


class Bf16Products(Step):
    """Replaces the kernels of products of fp32 tensors in the calls of set-up models and in their backward.

    Matrix products, convolutions, attention and LSTMs round their inputs to bf16, and sum and return fp32. Products
    that are too small for that to pay are torch's. A replaced kernel takes some microseconds to find that out, so after
    some steps products that are smaller than all that round are not looked at any more, and a kind of which none
    rounds has torch's kernels again. Then steps in fp32 and with what rounds take turns, and where those in fp32 are
    faster, all has torch's kernels. In a step that requires a closure, such as LBFGS', products are in fp32.
    """

    name = "precision"
    required = False

    @override
    def begin(self) -> None:
        self._in_force: dict[Replacement, ExitStack] = {}
        self._rounding = Rounding(self.options.kind.products or torch.float32, record_product)
        self._has_rounded = False
        self._kinds: set[_Kind] = set()
        self._optimizers: Any = WeakIdKeyDictionary()
        self._steps = 0
        self._models: Any = WeakIdKeyDictionary()
        self._names: dict[str, None] = {}  # of their classes
        self._all_round: bool | None = None
        self._budget: Budget | None = None
        self._trial: StepTrial[bool] | None = None
        self._timed: Callable[[], Optimizer | None] = lambda: None
        self._waited = 0
        self._began = self._in_fp32 = 0.0

    @property
    @override
    def enabled(self) -> bool:
        return self.options.kind.products is not None

    @property
    def _has_own_kernels(self) -> bool:
        """Whether C functions round: to bf16. To fp16's numbers, torch does, and multiplies in fp32."""
        return self.options.kind.products is torch.bfloat16

    @override
    def observe(self, parts: TrainingObjects) -> None:
        """Find out, once, whether products round on all ranks: hosts may differ in their CPUs. Collective."""
        if self._all_round is None:
            rounds = self.enabled and reason_against(self.options, self.machine) is None
            self._all_round = all(self.ranks.gather(rounds))

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        reason = reason_against(self.options, self.machine)
        if reason is not None:
            return reason
        if self._all_round is False:
            return SkipReason("other_ranks", "fp32, as on a rank that cannot round")
        if parts.models and not any(map(_has_fp32, parts.models)):
            return SkipReason("not_fp32", "the model has no parameters in fp32")
        if not any(map(has_large_products, parts.models)):
            return SkipReason("too_small", "fp32, since no layer is large enough for bf16 to pay")
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self.undoing.enter_context(line_searches_in_fp32())
        for model in parts.models:
            self._begin_with(model)
            self._models[model], self._names[class_name(model)] = True, None
        for optimizer in parts.optimizers:
            if optimizer not in self._optimizers:
                self._optimizers[optimizer] = True
                self.undoing.callback(optimizer.register_step_post_hook(self._look).remove)
        if self._budget is None and parts.optimizers and self._may_measure():
            self._budget = Budget(measures=True, part=_PART, in_advance=False)
            self.undoing.callback(self._budget.close)
            self.undoing.callback(self._leave_trial)
        self._leave_trial()
        self._steps = 0
        self._rounding.forget()
        return self.options.kind.summary

    def _begin_with(self, model: nn.Module) -> None:
        """Let the products of a model round that are large."""
        for kind in _KINDS:
            is_ready = kind.kernel is None or kind.kernel.unavailable is None or not self._has_own_kernels
            if kind.is_for(model) and is_ready:
                self._put_in_force(kind)
        interceptor = self.interceptors.for_model(model, self.name)
        interceptor.rules = {**interceptor.rules, RULE: self._rounding}

    @override
    def forget_times(self) -> None:
        self._leave_trial()
        for model in [*self._models]:
            self._begin_with(model)
        self._rounding.forget()
        self._steps = 0

    def _may_measure(self) -> bool:
        """Whether measured times may decide: not in ranks, which would not compute alike."""
        is_wanted = bool(self.options.tune_operators) and not self.options.compile
        return is_wanted and self.ranks.size == 1 and self._has_own_kernels

    @override
    def final_result(self) -> StepResult | None:
        """Return why no product was computed in bf16 at the end, or None."""
        names = ", ".join(self._names)
        if self._trial is not None and not self._trial.setting:
            fp32, rounded = (f"{self._trial.medians[setting] * 1e3:.3g} ms" for setting in (False, True))
            detail = f"fp32 for {names}: {fp32} a step, and {rounded} with bf16 inside of products"
            return StepResult(self.name, "measured", detail, code="slower")
        if self._has_rounded or self._rounding.fewest or not self._names:
            return None
        return StepResult(self.name, "measured", f"fp32 for {names}: no product is faster in bf16", code="too_small")

    def _put_in_force(self, kind: _Kind) -> None:
        self._kinds.add(kind)
        for replacement in kind.replacements:
            if replacement not in self._in_force:
                self._in_force[replacement] = self.undoing.enter_context(ExitStack())
                self._in_force[replacement].enter_context(replacement.in_force())

    def _take_back(self, kind: _Kind) -> None:
        for replacement in kind.replacements:
            self._in_force.pop(replacement).close()

    def _look(self, optimizer: Optimizer, *_: object) -> None:
        """Stop asking about products that do not round, once the tuner has chosen, and then try fp32 alone."""
        self._steps += 1
        if self._steps == _LOOKS_FROM:
            self._has_rounded |= bool(self._rounding.fewest)
            self._rounding.fewest.clear()
            self._rounding.multiplications, self._began = 0, time.perf_counter()
        if self._steps == _LOOKS_UNTIL:
            self._keep_what_rounds()
            self._in_fp32 = self._rounding.multiplications / (_RATE * torch.get_num_threads())
            self._in_fp32 /= time.perf_counter() - self._began
            if self._kinds and self._budget is not None:
                _settled.append(self)
        if self in _settled and self._budget is not None and may_depend_on_times():
            if not _trials:
                self._begin_trial(optimizer, self._budget)
            elif self is _trials[0] and optimizer is self._timed():
                self._note_step()
        if _trials:
            _trials[0]._wait_for_step()

    def _keep_what_rounds(self) -> None:
        self._rounding.learn()
        for kind in [kind for kind in self._kinds if kind.name not in self._rounding.fewest]:
            self._kinds.remove(kind)
            if not self._rounding.is_paused:
                self._take_back(kind)
        if not self._kinds:
            self.interceptors.release(self.name)

    def _begin_trial(self, optimizer: Optimizer, budget: Budget) -> None:
        settings: dict[str, Any] = {"pays": _PAYS, "wins": _WINS, "most": _ROUNDS}
        slowest = 1 + sum(step._in_fp32 for step in _settled)
        self._timed = weakref.ref(optimizer)  # of which each step ends a turn of the loop
        self._trial = StepTrial((True, False), _let_all_round, budget, slowest=slowest, **settings)
        _trials.append(self)
        self._waited = 0

    def _note_step(self) -> None:
        assert self._trial is not None
        self._trial.note()
        self._waited = 0
        if self._trial.measured:
            _trials.remove(self)
            for step in [*_settled]:
                _settled.remove(step)
                step._trial = self._trial
                if not self._trial.setting:
                    step._rounding.fewest.clear()
                    step._keep_what_rounds()

    def _wait_for_step(self) -> None:
        """End a trial whose optimizer steps no more, which would leave the products of others in fp32."""
        self._waited += 1
        if self._waited > _PATIENCE:
            self._leave_trial()

    def _leave_trial(self) -> None:
        """Take no part in a trial, and end one's own."""
        if self in _settled:
            _settled.remove(self)
        if self in _trials:
            _trials.remove(self)
            _let_all_round(True)
        self._trial = None
        self._let_round(True)

    def _let_round(self, rounds: bool) -> None:
        """Let the products of the kinds that are left round, or let them have torch's kernels."""
        if rounds != self._rounding.is_paused:
            return
        self._rounding.is_paused = not rounds
        for kind in [*self._kinds]:
            if rounds:
                self._put_in_force(kind)
            else:
                self._take_back(kind)


def _let_all_round(rounds: bool) -> None:
    for step in [*_settled]:
        step._let_round(rounds)


def _has_fp32(model: nn.Module) -> bool:
    return any(parameter.dtype is torch.float32 for parameter in parameters_of(model))


def line_searches_in_fp32() -> AbstractContextManager[None]:
    """Return a context in which products are in fp32 in the steps of optimizers that require a closure.

    Such steps compare losses, which differ by less than rounding does. A step has to begin in the context.
    """
    return shared_change("line searches in fp32", _hooked)


@contextmanager
def _hooked() -> Iterator[None]:
    hook = hook_before_steps(_with_closure_in_fp32)
    try:
        yield
    finally:
        hook.remove()


def _with_closure_in_fp32(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = closure_of(args, kwargs) if len(args) > 1 or kwargs else None
    if closure is None or not requires_closure(optimizer):
        return None
    return with_closure(args, kwargs, without_rule(RULE)(closure))
