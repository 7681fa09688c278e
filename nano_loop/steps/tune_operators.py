"""Times algorithms of operators, such as products, LSTMs and norms, in the first steps."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from typing_extensions import override

from nano_loop.autotune.choices import Choice, Choices, choices_for
from nano_loop.autotune.race import Generation
from nano_loop.autotune.tuner import Tuner
from nano_loop.cpu.process import Waits, is_busy, unsure
from nano_loop.kernels import embedding
from nano_loop.patching.calls.calls import CallInterceptor
from nano_loop.runtime.objects.report import StepResult, duration
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SMALL, SkipReason, Step

#: Kernels without a choice of algorithms.
_NOT_MEASURED = frozenset((embedding.KERNEL.name,))
#: After this many averagings, and at each doubling, the ranks adopt the measurements of rank 0.
_FIRST_SHARING = 4


class TuneOperators(Step):
    """Chooses algorithms of operators by rank 0's measurements; thresholds of `nano_loop.kernels` are first guesses."""

    name = "tune_operators"

    @override
    def begin(self) -> None:
        self._tuner: Tuner | None = None
        self._generation: Generation | None = None
        self._interceptors: weakref.WeakSet[CallInterceptor] = weakref.WeakSet()
        self._agreed_to: bool | None = None
        self._share = 0.0  # the largest fraction of time that threads waited, between two saves
        self._has_choices = False  # whether the models of an fp32 setup have choices, on all ranks

    @property
    def _is_in_fp32(self) -> bool:
        return self.options.kind.compute_name == "float32"

    @override
    def observe(self, parts: TrainingObjects) -> None:
        """Check once whether the step applies on all ranks: hosts may differ in their CPUs. Collective."""
        if self._agreed_to is None:
            is_used = self.enabled and self._own_reason() is None
            self._agreed_to = all(self.ranks.gather(is_used))

    @override
    def is_relevant(self, parts: TrainingObjects) -> bool:
        """Return whether there is a model, and check whether it has choices. Collective."""
        if not super().is_relevant(parts):
            return False
        if self._is_in_fp32:
            self._has_choices = all(self.ranks.gather(any(map(self._chooses, parts.models))))
        return True

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if self._is_in_fp32 and not self._has_choices:
            return SkipReason("too_small", "no layer is large enough for a choice", SMALL)
        reason = self._own_reason()
        if reason is not None:
            return reason
        if self._agreed_to is False:
            return SkipReason("other_ranks", "another rank computes in another precision")
        return None

    def _chooses(self, model: nn.Module) -> bool:
        """Whether earlier steps have given an fp32 model kernels or a policy with choices."""
        rules = self.interceptors.rules_of(model)
        may_round = self.options.kind.products is torch.bfloat16  # rounding to fp16 is never faster
        return (may_round and rules.policy is not None) or bool(rules.kernels - _NOT_MEASURED)

    def _own_reason(self) -> SkipReason | None:
        if not (self.options.reduced_precision or self._is_in_fp32):
            return SkipReason("not_bf16", "it is for bf16 and fp32", "for bf16 and fp32")
        if self.options.use_ipex:
            return SkipReason("ipex", "IPEX has its own kernels")
        if self.options.compile:
            return SkipReason("compiled", "compiled models are not measured")
        if self.options.log_casts:
            return SkipReason("log_casts", "log_casts would list the measured operators")
        if torch.are_deterministic_algorithms_enabled():
            detail = "measured choices may differ between runs, and torch.use_deterministic_algorithms is on"
            return SkipReason("deterministic", detail)
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self._generation is None:
            self._tuner = self._open()
            self._generation = Generation(self._tuner)
        for model in parts.models:
            self._interceptors.add(self.interceptors.for_model(model))
        self._put_in_force()
        return "measurements from the third step on"  # the same text in each run, so that it is printed once

    def _put_in_force(self) -> None:
        """Use the choices of this generation in calls that begin from now on."""
        for interceptor in self._interceptors:
            interceptor.rules = interceptor.rules._replace(chooser=self._generation)

    @override
    def final_result(self) -> StepResult | None:
        """Return the number of measured shapes, and the gain."""
        tuner = self._tuner
        if tuner is None or not tuner.measured:
            return None
        gain = sum(choice.gain for choice in tuner.new_choices)
        shapes = f"{tuner.measured} shape{'s' * (tuner.measured > 1)}"
        words = f"{shapes} timed in {duration(tuner.spent)}; {tuner.replaced} with another algorithm"
        faster = f", {duration(gain / 1e3)} faster in total" if gain else ""
        return StepResult(self.name, "applied", f"{words}{faster}{unsure(max(self._share, self._waits.share() or 0))}")

    def _open(self) -> Tuner:
        choices = self._agreed(choices_for(self.machine))
        if self.ranks.rank == 0:
            self._waits = Waits()
            self.undoing.callback(self._save)
            self.undoing.callback(self.clock.at_doublings(self._note_turn))  # in case the run is killed
        else:
            self.undoing.callback(self.clock.at_doublings(self._begin_generation))
        return Tuner(choices, self.budget)

    def _note_turn(self) -> None:
        """Save the measurements, and continue with the choices for torch's current number of threads."""
        self._save()
        self._begin_generation()
        tuner = self._tuner
        if tuner is not None and self.ranks.size == 1 and tuner.threads != torch.get_num_threads():
            tuner.use(choices_for(self.machine))

    def _begin_generation(self) -> None:
        """Choose again where the choice was a guess, in calls that begin from now on."""
        if self._generation is not None:
            self._generation = self._generation.next()
            self._put_in_force()

    def _save(self) -> None:
        """Save the measurements since the last save, unless other programs used the CPUs."""
        share, self._waits = self._waits.share(), Waits()
        if self._tuner is not None:
            self._tuner.choices.save(is_busy(share))
            self._share = max(self._share, share or 0.0)

    def _agreed(self, choices: Choices) -> Choices:
        """Return rank 0's choices, which all ranks adopt when it has measured more."""
        if self.ranks.size == 1:
            return choices
        choices_here = choices if self.ranks.rank == 0 else Choices(None)
        shared: set[str] = set()

        def share(averagings: int) -> None:
            if averagings < _FIRST_SHARING or averagings.bit_count() > 1:
                return
            new = [(key, *value) for key, value in choices_here.all().items() if key not in shared]
            received = self.ranks.broadcast(new)
            shared.update(key for key, *_ in received)
            choices_here.take_over({key: Choice(name, guess, times) for key, name, guess, times in received})

        share(_FIRST_SHARING)
        self.ranks.context.after_averaging.append(share)
        self.undoing.callback(self.ranks.context.after_averaging.remove, share)
        return choices_here
