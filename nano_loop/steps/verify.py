"""Compares the first batch of a run with the plain model, in fp32 and in fp64, on copies."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator
from itertools import chain, count
from typing import Any

from torch import Tensor
from typing_extensions import override

from nano_loop.errors import NanoWarning, error_message
from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.members import buffers_of, parameters_of
from nano_loop.patching.optimizers import held_by
from nano_loop.precision.verification.recorded_calls import NO_GRADIENT, RecordedCalls, loss_of
from nano_loop.precision.verification.traces import tensors_kept
from nano_loop.precision.verification.verification import Verification, verified
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step


class Verify(Step):
    """Records the calls into each model, and compares them before the first optimizer step after them.

    Copies run backward from their outputs with the gradients that reach these in the loop, whose loss is not known.
    """

    name = "verify"
    needs = "trained"

    @override
    def begin(self) -> None:
        self._recorded: list[RecordedCalls] = []
        self._verifications: dict[str, Verification] = {}

    @override
    def apply(self, parts: TrainingObjects) -> str:
        for model in parts.models if self.ranks.rank == 0 else ():
            known = any(recorded.model() is model for recorded in self._recorded)
            if not known and any(parameter.requires_grad for parameter in parameters_of(model)):
                if not self._recorded:
                    self.undoing.callback(self.clock.before(self._compare))
                recorded = RecordedCalls(model, self.options.kind.parameters is not None, _warn)
                self._recorded.append(recorded)
                self.interceptors.add(model, self.name, recorded.layer)
                undone_with(model, self.undoing).callback(recorded.end)
        return "of the first batch"

    @override
    def final_result(self) -> StepResult | None:
        if not self._recorded:
            return None
        self._compare()  # a step with a closure computes its gradients after the hook
        if not self._verifications:
            reasons = dict.fromkeys(recorded.reason or NO_GRADIENT for recorded in self._recorded)
            return StepResult(self.name, "skipped", "; ".join(reasons), code="not_compared")
        summaries = [f"{name}: {verification.summary()}" for name, verification in self._verifications.items()]
        return StepResult(self.name, "measured", "; ".join(summaries), _Findings(self._verifications))

    def _compare(self, *_: object) -> None:
        for recorded in self._recorded:
            recorded.guarded(self._compare_calls, recorded)

    def _compare_calls(self, recorded: RecordedCalls) -> None:
        if not recorded.is_ready:
            recorded.miss()
            return
        name = recorded.name
        model, calls = recorded.take()
        with tensors_kept(self._tensors()):
            verification = verified(model, loss_of, calls, self.options.kind, self.accelerated)
        self._verifications[_another(name, self._verifications)] = verification
        if not verification.ok:
            got = f"{verification.fault} of {name} is off by more than rounding"
            expected = "an accelerated model computes the same as the plain one"
            hint = "See the table: print(report['verify'].data). Remove options to find the one that causes it"
            warnings.warn(error_message(got, expected, hint), NanoWarning, stacklevel=2)

    def _tensors(self) -> Iterator[Tensor]:
        """Return the parameters and buffers of the loop's models and optimizers."""
        for recorded in self._recorded:
            model = recorded.model()
            yield from () if model is None else chain(parameters_of(model), buffers_of(model))
        for optimizer in self.clock.optimizers:
            yield from held_by(optimizer)


def _warn(reason: str) -> None:
    expected = "copies of the model and of its inputs must run in fp32 and in fp64"
    message = error_message(f"verify: {reason}", expected, "Omit verify for this model")
    warnings.warn(message, NanoWarning, stacklevel=4)


def _another(name: str, known: Container[str]) -> str:
    """Return a unique name: the name itself, or with a number."""
    numbered = (f"{name} {number}" for number in count(2))
    return next(candidate for candidate in chain([name], numbered) if candidate not in known)


class _Findings(dict[str, Verification]):
    """The results for each model, by class name."""

    def as_dict(self) -> dict[str, Any]:
        """Return the results as plain data for JSON."""
        return {name: verification.as_dict() for name, verification in self.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {verification}" for name, verification in self.items())
