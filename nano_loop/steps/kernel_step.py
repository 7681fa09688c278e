"""The steps that replace kernels: the fields of their table, and the class that applies a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from nano_loop.kernels.build import CompiledKernel, for_report
from nano_loop.kernels.override import Override
from nano_loop.patching.operators import NO_KERNELS, gives_kernels
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SkipReason, Step

#: At this optimizer step, and each doubling, torch's kernels are restored if no call used a replacement since the last.
LOOKS_FROM = 8


class Kernels(NamedTuple):
    """The replacements of torch's kernels."""

    kernel: CompiledKernel
    overrides: tuple[Override, ...]
    is_for: Callable[[nn.Module], bool]  # whether a model calls the replaced operators
    report_line: str
    not_applicable: SkipReason  # why models without such operators are skipped
    #: The line, before the reason, if plain operators replace functions that cannot be compiled. None if none do.
    without_kernel: str | None = None
    #: Additional contexts in which the kernels are replaced.
    contexts: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    remark: Callable[[], str | None] = lambda: None  # an addition to the report line at the end of the run

    @property
    def calls_torchs_kernels(self) -> bool:
        """Whether the remaining calls use torch's own kernels, which torch exposes from 2.9 on."""
        return any(override.otherwise is None for override in self.overrides)


class Row(NamedTuple):
    """A step that replaces kernels, with the name of the step and of its option."""

    name: str
    kernels: Kernels  # for reduced precision
    in_fp32: Kernels | None = None
    is_for_all_code: bool = False  # whether they apply in every precision, even if no model seems to call them


def step_of(row: Row) -> type[KernelStep]:
    """Return the step class for a row."""
    return type("".join(map(str.capitalize, row.name.split("_"))), (KernelStep,), {"row": row, "name": row.name})


class KernelStep(Step):
    """Replaces kernels of operators inside set-up models. Code that is not set up gets torch's own results.

    Rejecting a small tensor takes microseconds, so torch's are restored if no tensor is large, or none is faster in C.
    """

    row: ClassVar[Row]

    @override
    def begin(self) -> None:
        self._has_calls = False  # whether a set-up model seems to call the replaced operators
        self._calls_before = 0  # the functions' number of calls when they were activated
        self._in_force: ExitStack | None = None
        self._calls = 0
        self._is_idle = False  # whether torch's kernels were restored
        self._subscriptions = ExitStack()

    @property
    def _is_in_fp32(self) -> bool:
        return self.row.in_fp32 is not None and self.options.kind.compute_name == "float32"

    @property
    def kernels(self) -> Kernels:
        """The kernels for the run's precision."""
        return self.row.in_fp32 if self.row.in_fp32 is not None and self._is_in_fp32 else self.row.kernels

    @override
    def observe(self, parts: TrainingObjects) -> None:
        calls = self.required and any(self.kernels.is_for(model) or _is_scripted(model) for model in parts.models)
        self._has_calls |= calls
        # Code outside the models may call the kernel. The report lists the step once that happens.
        if self.row.is_for_all_code and self.enabled and parts.models and self.kernels.kernel.unavailable is None:
            self._put_in_force([])

    @property
    @override
    def unused_because(self) -> str | None:
        has_called = self._has_calls or self.kernels.kernel.calls != self._calls_before
        return None if has_called or not self.required else self.kernels.not_applicable.detail

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        kernels = self.kernels
        if not (self.row.is_for_all_code or self.options.reduced_precision or self._is_in_fp32):
            precisions = f"for bf16{' and fp32' if self.row.in_fp32 is not None else ''}"
            return SkipReason("not_bf16", f"it is {precisions}", precisions)
        if not (self.required or any(map(kernels.is_for, parts.models))):
            return kernels.not_applicable
        if kernels.calls_torchs_kernels and not gives_kernels():
            return SkipReason("old_torch", NO_KERNELS)
        reason = kernels.kernel.unavailable if kernels.without_kernel is None else None
        if reason is None:
            return None
        return SkipReason("no_kernel", reason if self.required else for_report(reason))

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self._put_in_force([] if self.row.is_for_all_code else parts.models)
        reason = self.kernels.kernel.unavailable
        return self.kernels.report_line if reason is None else f"{self.kernels.without_kernel}{for_report(reason)}"

    def _put_in_force(self, models: Iterable[nn.Module]) -> None:
        kernels = self.kernels
        for model in models:
            interceptor = self.interceptors.for_model(model, self.name)
            if self.row.in_fp32 is not None:
                names = interceptor.rules.kernels | {kernels.kernel.name}
                interceptor.rules = interceptor.rules._replace(kernels=names, takes_kernels=not self._is_in_fp32)
        if self._in_force is None:
            self._is_idle, self._calls_before = False, kernels.kernel.calls
            self._in_force = self.undoing.enter_context(ExitStack())
            for context in (*kernels.contexts, *(replaced.in_force for replaced in kernels.overrides)):
                self._in_force.enter_context(context())
        self._calls = kernels.kernel.calls
        if self._is_in_fp32:
            self._subscriptions.close()
            self._subscriptions.callback(self.clock.at_doublings(self._restore_unused, LOOKS_FROM))

    @override
    def final_result(self) -> StepResult | None:
        """Report that torch's kernels were restored, that functions were called unexpectedly, or a remark."""
        if self._is_idle:
            detail = "torch's kernels kept: tensors too small to gain"
            return StepResult(self.name, "measured", detail, code="too_small")
        if self.row.is_for_all_code and self._in_force is not None and self.kernels.kernel.calls != self._calls_before:
            return StepResult(self.name, "applied", self.kernels.report_line)
        remark = self.kernels.remark()
        return None if remark is None else StepResult(self.name, "applied", f"{self.kernels.report_line}; {remark}")

    def _restore_unused(self) -> None:
        """Restore torch's kernels if no call has used a function since the last check."""
        if self._in_force is not None and self.kernels.kernel.calls == self._calls:
            self._in_force.close()
            self._in_force, self._is_idle = None, True
            self.interceptors.release(self.name)
        self._calls = self.kernels.kernel.calls


def _is_scripted(model: nn.Module) -> bool:
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
