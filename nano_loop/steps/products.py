"""Rounds the inputs of large products to bf16 or fp16. All visible tensors and all other operators are fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn
from typing_extensions import override

from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.kernels import activations
from nano_loop.kernels.attention import blocked_attention, flash_attention
from nano_loop.kernels.build import CompiledKernel, for_report
from nano_loop.kernels.convolution import convolution, rounded_convolution
from nano_loop.kernels.head.data_attribute import data_replaced
from nano_loop.kernels.linear import linear, product
from nano_loop.kernels.norm.copied_inputs import COPIED_INPUTS
from nano_loop.kernels.override import Override
from nano_loop.kernels.rnn import recurrence
from nano_loop.patching.members import has_shape, parameters_of
from nano_loop.patching.operators import NO_KERNELS, gives_kernels
from nano_loop.policy.product_precision import ATTENTION, CONVOLUTION, LSTM, PRODUCT, Policy, line_searches_in_fp32
from nano_loop.precision.autocast.frozen_weights import remark_on_integers
from nano_loop.runtime.objects.report import StepResult, duration
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name, has_modules
from nano_loop.runtime.trial import StepTrial
from nano_loop.steps.log_casts import record_product
from nano_loop.steps.models import has_attention, has_convolutions, large_weights
from nano_loop.steps.step import SkipReason, Step

#: Minimum number of elements of a weight. For smaller ones, the overhead of the replacement outweighs the gain.
SMALLEST_WEIGHT = 1 << 15
_MATRIX = 2
#: The optimizer steps between which we observe which products round; large ones that were not measured by then round.
_WATCHES_FROM, LEARNS_AT = 24, 32
#: See `StepTrial`.
_PAYS, _WINS, ROUNDS = 1.03, 0.6, 16


class _Kind(NamedTuple):
    """A kind of products, which are computed in the same way."""

    name: str  # a key of `MIN_MULTIPLICATIONS`
    overrides: tuple[Override, ...]  # only for this kind; `fast_rnn` replaces those of LSTMs
    is_for: Callable[[nn.Module], bool]  # whether a model may have large products of this kind
    kernel: CompiledKernel | None = None  # that is required to round to bf16


def _has_large_weights(model: nn.Module) -> bool:
    return any(not has_shape(weight) or weight.dim() >= _MATRIX for weight in large_weights(model, SMALLEST_WEIGHT))


_KINDS = (
    _Kind(PRODUCT, (*linear.OVERRIDES, *linear.WITH_COPIES, activations.RELU), _has_large_weights, product.KERNEL),
    _Kind(
        CONVOLUTION,
        (*convolution.OVERRIDES, *rounded_convolution.OVERRIDES, *COPIED_INPUTS, activations.RELU),
        has_convolutions,
    ),
    _Kind(
        ATTENTION, (*flash_attention.OVERRIDES, flash_attention.WITH_COPIES), has_attention, blocked_attention.KERNEL
    ),
    _Kind(LSTM, (), lambda model: has_modules(model, (nn.LSTM,)), recurrence.KERNEL),
)


def reason_against(options: Options, machine: Machine) -> SkipReason | None:
    """Return why this process computes products in fp32, or None."""
    in_bf16 = options.kind.products is torch.bfloat16
    if options.use_ipex:
        return SkipReason("ipex", "fp32, since IPEX has its own kernels")
    if in_bf16 and not machine.has_fast_bf16:
        return SkipReason("no_bf16_instructions", "fp32, since this CPU has no bf16 instructions")
    if not gives_kernels():
        return SkipReason("old_torch", f"fp32, since {NO_KERNELS}")
    if in_bf16 and product.KERNEL.unavailable is not None:
        return SkipReason("no_kernel", f"fp32, since {for_report(product.KERNEL.unavailable)}")
    return None


class Products(Step):
    """Gives set-up models a `Policy` that rounds the inputs of fp32 products, and replaces the kernels.

    A replacement takes some microseconds to detect a product that is too small to gain. So after some steps it no
    longer checks products that are smaller than all that round, and torch's kernels are restored for kinds of which
    none rounds. Then steps alternate between fp32 and bf16, and if fp32 is faster, all are restored; later runs start
    in fp32.
    """

    name = "precision"
    required = False

    @override
    def begin(self) -> None:
        self._policy = Policy(self.options.kind.products or torch.float32, record_product)
        self._kinds: set[_Kind] = set()
        self._in_force: dict[Override, ExitStack] = {}
        self._subscriptions = ExitStack()  # subscriptions to the clock
        self._names: dict[str, None] = {}  # names of the models' classes
        self._all_round: bool | None = None
        self._trial: StepTrial[bool] | None = None

    @property
    @override
    def enabled(self) -> bool:
        return self.options.kind.products is not None

    @override
    def observe(self, parts: TrainingObjects) -> None:
        """Check once whether products can round on all ranks: hosts may differ in their CPUs. Collective."""
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
        dtypes = {parameter.dtype for model in parts.models for parameter in parameters_of(model)}
        if parts.models and torch.float32 not in dtypes:
            return SkipReason("not_fp32", "the model has no parameters in fp32")
        if not any(kind.is_for(model) for model in parts.models for kind in _KINDS):
            return SkipReason("too_small", "fp32, since no layer is large enough for rounding")
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self.undoing.enter_context(line_searches_in_fp32())
        self.undoing.enter_context(data_replaced())
        for model in parts.models:
            self._names[class_name(model)] = None
            self._kinds |= {kind for kind in _KINDS if kind.is_for(model) and self._is_ready(kind)}
            interceptor = self.interceptors.for_model(model, self.name)
            interceptor.rules = interceptor.rules._replace(policy=self._policy)
        self.undoing.callback(self._subscriptions.close)
        # Let all large products round, until it is measured again which ones do and whether that is faster.
        self._policy.forget()
        self._subscriptions.close()
        self._subscriptions.callback(self.clock.in_steps(_WATCHES_FROM, self._policy.watch))
        self._subscriptions.callback(self.clock.in_steps(LEARNS_AT, self._learn))
        self._let_round(True)
        if self._may_measure():
            self._begin_trial()
        remarks = filter(None, map(remark_on_integers, parts.models))
        return "; ".join([self.options.kind.summary, *dict.fromkeys(remarks)])

    def _is_ready(self, kind: _Kind) -> bool:
        in_bf16 = self._policy.dtype is torch.bfloat16
        return not in_bf16 or kind.kernel is None or kind.kernel.unavailable is None

    def _may_measure(self) -> bool:
        """Whether measured times may decide: not with several ranks, which must compute the same, and not for fp16."""
        is_wanted = bool(self.options.tune_operators) and not self.options.compile
        return is_wanted and self.ranks.size == 1 and self._policy.dtype is torch.bfloat16

    def _begin_trial(self) -> None:
        """Compute in fp32 if earlier runs of these models were faster so. Nothing is measured before `_learn`."""
        trial = self._trial = StepTrial(
            *("rounding", (True, False), self._let_round, self.budget, self.machine),
            settled=self._settle,
            pays=_PAYS,
            wins=_WINS,
            most=ROUNDS,
        )
        trial.may_measure = False
        self._subscriptions.callback(trial.end)
        self._subscriptions.callback(self.clock.after(trial.note))

    def _learn(self) -> None:
        cost = self._policy.learn()
        self._replace_kernels()
        if self._trial is None or self._trial.medians or not self._may_round():
            self._subscriptions.close()
        else:
            self._trial.longer, self._trial.may_measure = cost, True

    def _let_round(self, rounds: bool) -> None:
        """Let products round if they may, or compute all in fp32 for now."""
        self._policy.is_paused = not rounds
        self._replace_kernels()

    def _settle(self) -> None:
        """Compute all products in fp32 from now on if steps in fp32 were faster."""
        assert self._trial is not None
        if not self._trial.setting:
            self._policy.end()
            self._replace_kernels()
        if self._trial.may_measure or not self._trial.setting:
            self._subscriptions.close()
        else:
            self._trial.end()  # as in an earlier run: the policy has still to learn

    def _may_round(self) -> bool:
        return any(self._policy.may_any_round(kind.name) for kind in self._kinds)

    def _replace_kernels(self) -> None:
        """Replace exactly the kernels whose products may round now."""
        kinds = [kind for kind in self._kinds if self._policy.may_any_round(kind.name) and not self._policy.is_paused]
        wanted = {replaced for kind in kinds for replaced in kind.overrides}
        for replaced in self._in_force.keys() - wanted:
            self._in_force.pop(replaced).close()
        for replaced in wanted - self._in_force.keys():
            self._in_force[replaced] = self.undoing.enter_context(ExitStack())
            self._in_force[replaced].enter_context(replaced.in_force())
        if self._names and not self._may_round():
            self.interceptors.release(self.name)

    @override
    def final_result(self) -> StepResult | None:
        """Return why no product or no convolution rounded at the end, or None."""
        names = ", ".join(self._names)
        trial = self._trial
        if trial is not None and trial.medians and not trial.setting:
            fp32, rounded = (duration(trial.medians[setting]) for setting in (False, True))
            detail = f"fp32 for {names}: {fp32} per step, and {rounded} with bf16 inside products{trial.unsure}"
            return StepResult(self.name, "measured", detail, code="slower")
        untried = self._policy.large - self._policy.tried
        if CONVOLUTION in untried and not self.options.channels_last:
            detail = f'convolutions of {names} are fp32, since they round only in NHWC: pass channels_last="auto"'
            return StepResult(self.name, "measured", detail, code="nchw")
        if self._policy.has_rounded or not self._names:
            return None
        if self._policy.large - untried:
            why = SkipReason("not_faster", "no product that was tried is faster in bf16")
        elif untried:
            why = SkipReason("untried", "no rounding kernel supports its products")
        else:
            why = SkipReason("too_small", "no product is large enough")
        return StepResult(self.name, "measured", f"fp32 for {names}: {why.detail}", code=why.code)
