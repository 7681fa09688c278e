"""The base class of steps that swap kernels."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from nano_loop.kernels.build import CompiledKernel, for_report
from nano_loop.kernels.fp32 import always, by_guess, rule_of
from nano_loop.kernels.replacement import Choose, Replacement
from nano_loop.patching.operators.operators import gives_kernels
from nano_loop.runtime.objects.called_functions import functions_called
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects, has_modules
from nano_loop.steps.step import SkipReason, Step

#: After how many steps of optimizers, and their doubles, replacements that have not called their functions since end.
LOOKS_FROM = 8


class KernelStep(Step):
    """Swaps kernels of operators inside set-up models. Code that is not set up gets torch's own results.

    A replaced kernel takes some microseconds to find out that a tensor is small, which small models in fp32 would lose.
    So its kernels are torch's again where no tensor of the first steps is large, or none is faster in C.
    """

    auto_is_for_reduced_precision = True

    #: Whether it computes fp32 tensors, too: where that is faster in runs in fp32, and all in reduced precision.
    takes_fp32: ClassVar[bool] = False
    #: What replaces torch's kernels.
    replacements: ClassVar[tuple[Replacement, ...]] = ()
    #: The compiled functions.
    kernel: ClassVar[CompiledKernel]
    #: Those for fp32 tensors, where another file has them.
    fp32_kernel: ClassVar[CompiledKernel | None] = None
    #: The line of the report.
    says: ClassVar[str]
    #: The line where plain operators replace functions that cannot be compiled, before the reason. None: none do.
    says_without_kernel: ClassVar[str | None] = None
    #: Why models without such operators are skipped. None: they have no line in the report.
    absent: ClassVar[SkipReason | None] = None
    #: The modules that call the replaced operators, where `is_for` does not find them otherwise.
    modules: ClassVar[tuple[type[nn.Module], ...]] = ()
    #: The functions of torch that call them, where models do not by modules.
    functions: ClassVar[frozenset[str]] = frozenset()
    #: Whether `is_for` finds every model that calls them, so that a run without one cannot apply the step.
    finds_all: ClassVar[bool] = False
    #: Whether the replacements call torch's own kernels, which torch returns from 2.9 on.
    calls_torchs_kernels: ClassVar[bool] = True

    @override
    def begin(self) -> None:
        self._has_calls = False  # whether a model that was set up calls the replaced operators
        self._in_force: ExitStack | None = None
        self._models: Any = WeakIdKeyDictionary()
        self._optimizers: Any = WeakIdKeyDictionary()
        self._steps = self._calls = 0

    @property
    @override
    def enabled(self) -> bool:
        is_auto = getattr(self.options, self.name) == "auto"
        return super().enabled or (is_auto and self._is_in_fp32)

    @property
    def _is_in_fp32(self) -> bool:
        return self.takes_fp32 and self.options.kind.compute_name == "float32"

    @property
    def _kernel(self) -> CompiledKernel:
        """The compiled functions of the run's precision."""
        return self.kernel if self.fp32_kernel is None or not self._is_in_fp32 else self.fp32_kernel

    @classmethod
    def is_for(cls, model: nn.Module) -> bool:
        """Whether a model has modules that call the replaced operators, or calls functions that do."""
        return has_modules(model, cls.modules) or not cls.functions.isdisjoint(functions_called(model))

    @override
    def observe(self, parts: TrainingObjects) -> None:
        self._has_calls |= self.required and any(self.is_for(model) or _is_scripted(model) for model in parts.models)

    @property
    @override
    def unused_because(self) -> str | None:
        if not self.required or not self.finds_all or self._has_calls:
            return None
        return "no model has such modules" if self.absent is None else self.absent.detail

    @override
    def is_relevant(self, parts: TrainingObjects) -> bool:
        return super().is_relevant(parts) and (self.absent is not None or self._is_wanted(parts))

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if self.auto_is_for_reduced_precision and not (self.options.reduced_precision or self._is_in_fp32):
            return SkipReason("not_bf16", f"it is for bf16{' and fp32' if self.takes_fp32 else ''}")
        if self.calls_torchs_kernels and not gives_kernels():
            expected = f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
            return SkipReason("old_torch", expected)
        if self.absent is not None and not self._is_wanted(parts):
            return self.absent
        reason = self._kernel.unavailable if self.says_without_kernel is None else None
        if reason is None:
            return None
        return SkipReason("no_kernel", reason if self.required else for_report(reason))

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self._begin_with(parts.models)
        for model in parts.models:
            self._models[model] = True
        if self._is_in_fp32:
            self._watch(parts)
        reason = self._kernel.unavailable
        return self.says if reason is None else f"{self.says_without_kernel}{for_report(reason)}"

    def _begin_with(self, models: Iterable[nn.Module]) -> None:
        for model in models:
            interceptor = self.interceptors.for_model(model, self.name)
            if self.takes_fp32:
                interceptor.rules = {**interceptor.rules, rule_of(self._kernel): self.rule}
        if self._in_force is None:
            self._in_force = self.undoing.enter_context(ExitStack())
            for context in self.contexts():
                self._in_force.enter_context(context)
        self._steps, self._calls = 0, self._kernel.calls

    @override
    def forget_times(self) -> None:
        if self._models and self._in_force is None:  # since no call of these was faster
            self._begin_with([*self._models])

    @property
    def rule(self) -> Choose:
        """The models' rule that selects functions for fp32 tensors, until `tune_operators` measures."""
        return by_guess if self._is_in_fp32 else always

    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        """Return the contexts in which the kernels are replaced. They are entered once a run."""
        return [replacement.in_force() for replacement in self.replacements]

    @override
    def final_result(self) -> StepResult | None:
        """Return that torch's kernels are in force again, or None."""
        if self._in_force is not None or self._steps < LOOKS_FROM:
            return None
        return StepResult(
            self.name, "measured", "torch's kernels, which are as fast for these tensors", code="too_small"
        )

    def _watch(self, parts: TrainingObjects) -> None:
        for optimizer in parts.optimizers:
            if optimizer not in self._optimizers:
                self._optimizers[optimizer] = True
                self.undoing.callback(optimizer.register_step_post_hook(self._look).remove)

    def _look(self, *_: object) -> None:
        self._steps += 1
        if self._steps < LOOKS_FROM or self._steps.bit_count() > 1 or self._in_force is None:
            return
        if self._kernel.calls == self._calls:
            self._in_force.close()
            self._in_force = None
            self.interceptors.release(self.name)
        self._calls = self._kernel.calls

    def _is_wanted(self, parts: TrainingObjects) -> bool:
        return self.required or any(map(self.is_for, parts.models))


def _is_scripted(model: nn.Module) -> bool:
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
