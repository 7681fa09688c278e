"""Runs the models under bf16 autocast; parameters, gradients and what the loop sees stay fp32."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from nano_loop.errors import NanoWarning, problem
from nano_loop.intercept.calls import Call, is_forward
from nano_loop.intercept.nested import map_tensors
from nano_loop.parts import Parts
from nano_loop.precision.autocast import bf16_autocast, to_fp32
from nano_loop.steps.step import Step


class Precision(Step):
    """Enters autocast for each outermost call into a model, and leaves it when the call returns.

    Autocast keeps its bf16 copies of the weights until it is left, so one autocast around the whole loop would go on
    computing with the weights of the first step. In methods other than ``forward``, which may change the weights
    themselves, or hold the whole loop, it keeps no copies.
    """

    name = "precision"
    required = False

    @property
    def asked(self) -> bool:
        """See `Step.asked`."""
        return self.config.reduced_precision or self.config.auto_precision

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        return None if self.config.reduced_precision else "fp32, for this CPU has no bf16 instructions"

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        if not self.machine.has_fast_bf16:
            self._warn()
        for model in parts.models:
            self.entries.add(model, self.name, _under_autocast)
        return "bf16 autocast, outputs fp32"

    def _warn(self) -> None:
        given = f"{self.config.given['precision']} on {self.machine.name}"
        lack = "this CPU has no bf16 instructions, so bf16 will be slower than fp32"
        warnings.warn(problem(given, lack, 'Take precision="auto"'), NanoWarning, stacklevel=2)


def _under_autocast(call: Call) -> Call:
    def with_autocast(function: Call, *args: Any, **kwargs: Any) -> Any:
        # An autocast or a `disable_casts` of the user's own around the call is what the plain loop would obey.
        if torch.is_autocast_enabled("cpu"):
            return call(function, *args, **kwargs)
        with bf16_autocast(keep_casts=is_forward(function)):
            outputs = call(function, *args, **kwargs)
        return map_tensors(to_fp32, outputs)

    return with_autocast
